"""What a student asks for besides a check: hints, words, a fresh stub, the solution."""
