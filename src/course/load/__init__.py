"""`course load`: stage 06's harness, pointed at any OpenAI-compatible server.

The parts of stage 06 decide when a request is sent and what a latency is. Here is everything around
them: the HTTP client, prompts, progress, table, JSON and plot; a server whose delays are known; and
an event loop in virtual time.
"""
