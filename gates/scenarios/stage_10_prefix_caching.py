"""Stage 10, the half that runs beside the solution."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

import torch
from growth import grown_by
from poison import poison
from stage_07_block_allocator import POOLS as PLAIN_POOLS
from stage_07_block_allocator import Pool as PlainPool
from stage_07_block_allocator import do, look, watch

from course.engine import Runner
from course.parts import PagedAttention, step_batch
from course.types import OutOfBlocks, Request, SamplingParams, Sequence, Step

__all__ = [
    "admit", "append", "asks", "check", "compute", "deep", "do", "first_tokens", "fork", "free",
    "hashes", "kept_bytes", "look", "lookup", "make", "mistaken", "new", "open_pool", "publish",
    "recycle", "state", "touch",
]  # fmt: skip

POOLS: dict[str, "Pool"] = {}  # by the name that the judge gives them

PLANTED = {  # hash functions that collide
    "all": lambda parent, tokens: 7,
    "texts": lambda parent, tokens: hash(tokens),  # whatever comes before
    "beginnings": lambda parent, tokens: hash((parent, len(tokens))),  # whatever it holds
    "none": lambda parent, tokens: hash((parent, tokens)),
}


class Pool:
    """An allocator, the sequences that it serves, and perhaps memory and a model."""

    def __init__(
        self, env: Any, num_blocks: int, block_size: int, collide: str | None, model: str | None
    ) -> None:
        self.num_blocks = num_blocks
        self.calls = 0
        self.refusal: dict[str, Any] = {}  # the numbers of the last error
        self.sequences: dict[str, Sequence] = {}
        self.last: Sequence | None = None  # that was looked up, or was to be admitted
        self.runner: Runner | None = None
        kind = env.solution.PrefixCachingAllocator
        if model is not None:
            decoder = env.model(model)
            attention = PagedAttention(
                decoder.config, num_blocks, block_size, dtype=decoder.dtype, device=env.device
            )
            poison(attention)
            self.runner = Runner(decoder, attention, step_batch)
            kind = poisoned(kind, attention)
        planted = {} if collide is None else {"hash_block": self.counted(PLANTED[collide])}
        self.allocator = kind(num_blocks, block_size, **planted)

    def counted(self, hash_block: Any) -> Any:
        """The same function, which counts how often it is called."""

        def counting(parent: int, tokens: tuple[int, ...]) -> int:
            self.calls += 1
            return hash_block(parent, tokens)

        return counting

    def state(self, result: Any = None) -> dict[str, Any]:
        """All that the judge may see."""
        allocator = self.allocator
        return {
            "result": result,
            "sequences": {name: fields(s) for name, s in self.sequences.items()},
            "last": None if self.last is None else fields(self.last),
            "num_free": allocator.num_free,
            "ref_counts": [allocator.ref_count(block) for block in range(self.num_blocks)],
            "calls": self.calls,
        }

    def run(self, call: Any) -> dict[str, Any]:
        """Call the solution, and look."""
        self.refusal = {}
        try:
            result = call()
        except Exception as error:
            self.refusal = {name: getattr(error, name, None) for name in ("needed", "free")}
            raise
        return self.state(result)


def fields(sequence: Sequence) -> list[Any]:
    """What an allocator may set in a sequence, and its tokens."""
    return [sequence.block_table, sequence.num_computed, sequence.num_cached, sequence.tokens]


def poisoned(kind: Any, attention: PagedAttention) -> Any:
    """A subclass whose blocks hold NaN when they are taken, until they are written."""

    class Poisoned(kind):
        def take(self) -> Any:
            block = super().take()
            attention.keys[:, block] = attention.values[:, block] = torch.nan
            return block

    return Poisoned


def asked(request: dict[str, Any]) -> Request:
    """A request from plain values: `prompt_ids`, fields of its sampling, and others of its own."""
    values = {**request, "prompt_ids": tuple(request["prompt_ids"])}
    params = SamplingParams(**values.pop("params", {}))
    return Request(**{"request_id": "r", **values, "params": params})


def open_pool(
    env: Any, pool: str, num_blocks: int, block_size: int, collide: str | None, model: str | None
) -> dict[str, Any]:
    """A new pool. collide: which planted hash is handed in; None for the solution's own.

    model: whose keys and values lie in it; None for no memory at all.
    """
    POOLS[pool] = Pool(env, num_blocks, block_size, collide, model)
    return POOLS[pool].state()


def state(env: Any, pool: str) -> dict[str, Any]:
    """The state, and what the last refusal said in numbers."""
    return {"refusal": POOLS[pool].refusal, **POOLS[pool].state()}


def lookup(env: Any, pool: str, request: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
    """What `cached_blocks` says of a sequence that is served nowhere yet."""
    kept = POOLS[pool]
    kept.last = sequence = Sequence(asked(request), list(tokens))
    return kept.run(lambda: kept.allocator.cached_blocks(sequence))


def admit(
    env: Any, pool: str, name: str, request: dict[str, Any] | None, reserve: Any
) -> dict[str, Any]:
    """Admit a new sequence, or one that has lost its blocks (no request)."""
    kept = POOLS[pool]
    sequence = kept.sequences[name] if request is None else Sequence.of(asked(request))
    kept.last = sequence
    if reserve is None:
        reply = kept.run(lambda: kept.allocator.admit(sequence))
    else:
        reply = kept.run(lambda: kept.allocator.admit(sequence, reserve=reserve))
    kept.sequences[name] = sequence
    return kept.state(reply["result"])


def append(env: Any, pool: str, name: str, tokens: list[int]) -> dict[str, Any]:
    """Room for more tokens of a sequence, and the tokens; the pairs are copied."""
    kept = POOLS[pool]
    sequence = kept.sequences[name]
    reply = kept.run(
        lambda: kept.allocator.append(sequence.block_table, len(sequence.tokens), len(tokens))
    )
    sequence.tokens += tokens
    if kept.runner is not None:
        kept.runner.attention.copy_blocks(reply["result"])
    return kept.state(reply["result"])


def compute(env: Any, pool: str, counts: dict[str, int]) -> dict[str, Any]:
    """Feed the next tokens of some sequences; gives the tokens that come next, if a model runs."""
    kept = POOLS[pool]
    sequences = [kept.sequences[name] for name in counts]
    tokens = []
    if kept.runner is not None:
        tokens = kept.runner(Step(sequences, list(counts.values())))
    for sequence, count in zip(sequences, counts.values(), strict=True):
        sequence.num_computed += count
    return kept.state(tokens)


def publish(env: Any, pool: str, names: list[str]) -> dict[str, Any]:
    """Publish what some sequences have computed, one after the other."""
    kept = POOLS[pool]
    return kept.run(lambda: [kept.allocator.publish(kept.sequences[name]) for name in names][:0])


def fork(env: Any, pool: str, name: str, other: str) -> dict[str, Any]:
    """A second sequence that goes on from the same blocks."""
    kept = POOLS[pool]
    old = kept.sequences[name]
    table = kept.allocator.fork(old.block_table)
    kept.sequences[other] = Sequence(
        old.request, list(old.tokens), old.num_computed, table, num_cached=old.num_cached
    )
    return kept.state()


def free(env: Any, pool: str, name: str, forget: bool) -> dict[str, Any]:
    """Give the blocks of a sequence back. forget: it has ended, and is not looked at any more."""
    kept = POOLS[pool]
    sequence = kept.sequences[name]
    reply = kept.run(lambda: kept.allocator.free(sequence.block_table))
    sequence.num_computed = 0  # num_cached stays: it says what the last admission has found
    if forget:
        del kept.sequences[name]
    return kept.state(reply["result"])


def check(env: Any, pool: str) -> dict[str, Any]:
    """`check` against all tables."""
    kept = POOLS[pool]
    tables = [sequence.block_table for sequence in kept.sequences.values()]
    return kept.run(lambda: kept.allocator.check(tables))


def touch(env: Any, pool: str, op: str, given: dict[str, Any], reserve: Any = 0) -> None:
    """Call `admit` or `publish` with a sequence that is in no order."""
    allocator = POOLS[pool].allocator
    sequence = Sequence(asked({"prompt_ids": given["tokens"]}), list(given["tokens"]))
    sequence.num_computed = given.get("num_computed", 0)
    sequence.block_table = list(given.get("block_table", []))
    if op == "admit":
        allocator.admit(sequence, reserve=reserve)
    else:
        allocator.publish(sequence)


def hashes(env: Any, calls: list[Any]) -> list[Any]:
    """What `hash_block` says: of (parent, tokens) each; a parent may be ["result", index]."""
    found: list[Any] = []
    for parent, tokens in calls:
        before = found[parent[1]] if isinstance(parent, list) else parent
        found.append(env.solution.hash_block(before, tuple(tokens)))
    return found


def asks(env: Any, tokens: list[int], salts: list[str], block_size: int) -> list[Any]:
    """What a planted `hash_block` is asked about a text that is published, and then looked up.

    For each salt: (parent, tokens, what it answered) of every call.
    """
    found: list[Any] = []

    def recording(parent: Any, block: Any) -> int:
        found[-1].append((parent, block, hash((parent, block))))
        return hash((parent, block))

    kind = env.solution.PrefixCachingAllocator
    allocator = kind(4 * len(tokens), block_size, hash_block=recording)
    for salt in salts:
        found.append([])
        for _ in range(2):
            sequence = Sequence.of(asked({"prompt_ids": tokens, "cache_salt": salt}))
            allocator.admit(sequence)
            sequence.num_computed = len(sequence.tokens)
            allocator.publish(sequence)
    return found


def make(env: Any, num_blocks: Any, block_size: Any) -> None:
    """Make an allocator, and nothing else."""
    env.solution.PrefixCachingAllocator(num_blocks, block_size)


def new(env: Any, pool: str, num_blocks: Any, block_size: Any, watched: bool = False) -> None:
    """A pool as stage 07's gate drives it."""
    kind = env.solution.PrefixCachingAllocator
    allocator = (watch(kind) if watched else kind)(num_blocks, block_size)
    PLAIN_POOLS[pool] = PlainPool(allocator, num_blocks, watched)


class Token(int):
    """A token that counts how often one is compared with another."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Token.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


class Watched(list):  # type: ignore[type-arg]
    """A list that counts the items that are read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        got = super().__getitem__(index)
        Watched.read += len(got) if isinstance(index, slice) else 1
        return got

    def __iter__(self) -> Any:
        Watched.read += len(self)
        return super().__iter__()

    def __reversed__(self) -> Any:
        Watched.read += len(self)
        return super().__reversed__()


class Parent:
    """The field `parent` of a Prefix, which counts how often a text is followed back.

    slot: what stood there, if the class has slots.
    """

    read = 0

    def __init__(self, slot: Any) -> None:
        self.slot = slot

    def __get__(self, prefix: Any, kind: Any) -> Any:
        Parent.read += 1
        if prefix is None:
            return self
        return prefix.__dict__["parent"] if self.slot is None else self.slot.__get__(prefix, kind)

    def __set__(self, prefix: Any, value: Any) -> None:
        if self.slot is None:
            prefix.__dict__["parent"] = value
        else:
            self.slot.__set__(prefix, value)


@contextmanager
def parents_counted(solution: Any) -> Iterator[None]:
    """Meanwhile `Parent.read` counts. A solution with a key of its own need not have a Prefix."""
    prefix = getattr(solution, "Prefix", None)
    if prefix is None:
        yield
        return
    slot = vars(prefix).get("parent")
    prefix.parent = Parent(slot)
    try:
        yield
    finally:
        if slot is None:
            del prefix.parent
        else:
            prefix.parent = slot


@contextmanager
def own_hash_collides(solution: Any) -> Iterator[None]:
    """Meanwhile the solution's own `hash_block` has one hash for everything.

    Its code is exchanged, so that it is the same function for whoever asks, by any name. One that
    is no plain function stays as it is.
    """

    def seven(parent: int, tokens: tuple[int, ...], *_: Any, **__: Any) -> int:
        return 7

    own = solution.hash_block
    if not isinstance(own, FunctionType) or own.__closure__:
        yield
        return
    code = own.__code__
    own.__code__ = seven.__code__
    try:
        yield
    finally:
        own.__code__ = code


def deep(env: Any, blocks: int) -> dict[str, Any]:
    """A text of many blocks, of which the first copy has been taken while its twin went on.

    It is computed anew. Gives the blocks found then, for the text and what its twin added to it;
    how many tokens were compared and parents of a Prefix looked at in all; and how many items of
    the twin's tokens and table were read to publish its last block.
    """
    Token.compared = Parent.read = 0
    with parents_counted(env.solution):
        found, read = _deep(env.solution.PrefixCachingAllocator(2 * blocks + 3, 1), blocks)
    return {"found": found, "compared": Token.compared + Parent.read, "read": read}


def _deep(allocator: Any, blocks: int) -> tuple[list[Any], int]:
    """What is found in the end, and the items that were read."""
    text = list(range(blocks))
    more = [blocks + 1, blocks + 2]

    def admitted(tokens: list[int]) -> Sequence:
        sequence = Sequence.of(asked({"prompt_ids": [Token(token) for token in tokens]}))
        allocator.admit(sequence)
        return sequence

    def computed(sequence: Sequence) -> None:
        sequence.num_computed = len(sequence.tokens)
        allocator.publish(sequence)

    def grown(sequence: Sequence, tokens: list[int]) -> None:
        allocator.append(sequence.block_table, len(sequence.tokens), len(tokens))
        sequence.tokens += [Token(token) for token in tokens]

    first, twin = admitted(text), admitted(text)
    computed(first)
    computed(twin)
    grown(twin, more[:1])
    computed(twin)
    grown(twin, more[1:])
    twin.tokens, twin.block_table = Watched(twin.tokens), Watched(twin.block_table)
    Watched.read = 0
    computed(twin)
    read = Watched.read
    for tokens in ([blocks] * blocks, text):  # who takes the first copy; and the text, once more
        allocator.free(first.block_table)
        first = admitted(tokens)
        computed(first)
    last = [Token(token) for token in (*text, *more, 0)]
    return list(allocator.cached_blocks(Sequence(twin.request, last))), read


def mistaken(env: Any, texts: list[Any], block_size: int) -> list[Any]:
    """The first of some texts, [tokens, salt], is published, and the solution's own hash collides.

    Gives its table, and what each of the texts finds.
    """

    def new(tokens: list[int], salt: str) -> Sequence:
        return Sequence.of(asked({"prompt_ids": tokens, "cache_salt": salt}))

    with own_hash_collides(env.solution):
        allocator = env.solution.PrefixCachingAllocator(len(texts[0][0]), block_size)
        first = new(*texts[0])
        allocator.admit(first)
        first.num_computed = len(first.tokens)
        allocator.publish(first)
        return [first.block_table, [allocator.cached_blocks(new(*text)) for text in texts]]


# -- numbers --------------------------------------------------------------------------------------


def first_tokens(
    env: Any, model: str, shared: list[int], own: list[list[int]], num_blocks: int, block_size: int
) -> Iterator[list[int]]:
    """A text, and then others that begin alike: [first token, tokens that were cached] of each.

    Each step admits one, computes what is left of it, takes its first token, publishes and frees.
    """
    pool = Pool(env, num_blocks, block_size, None, model)
    assert pool.runner is not None
    for tokens in own:
        sequence = Sequence.of(asked({"prompt_ids": shared + tokens}))
        pool.allocator.admit(sequence)
        cached = sequence.num_computed
        left = len(sequence.tokens) - cached
        (token,) = pool.runner(Step([sequence], [left]))
        sequence.num_computed += left
        pool.allocator.publish(sequence)
        pool.allocator.free(sequence.block_table)
        yield [token, cached]


def kept_bytes(env: Any, num_blocks: int, block_size: int, rounds: int) -> int:
    """Bytes of Python objects by which a pool grows while it serves texts that it has never seen,
    and twins of them, refuses some, and then serves one of them again and again.

    The first `num_blocks` texts are left out: every block has been cached by then.
    """
    allocator = env.solution.PrefixCachingAllocator(num_blocks, block_size)
    rng = random.Random(num_blocks)
    names = iter(range(10**12))

    def new(tokens: list[int]) -> Sequence:
        return Sequence.of(asked({"request_id": f"r{next(names)}", "prompt_ids": tokens}))

    def serve(tokens: list[int], copies: int) -> None:
        twins = [new(tokens) for _ in range(copies)]
        for sequence in twins:
            allocator.admit(sequence)
        for sequence in twins:
            sequence.num_computed = len(tokens)
            allocator.publish(sequence)
        for sequence in twins:
            allocator.free(sequence.block_table)

    def play(count: int) -> None:
        for index in range(count):
            tokens = [rng.randrange(999) for _ in range(3 * block_size + 1)]
            with suppress(OutOfBlocks):
                allocator.admit(new(tokens), reserve=num_blocks)
            serve(tokens, 1 + index % 2)
        for _ in range(count):
            serve(tokens, 1)

    return grown_by(lambda: play(rounds), after=lambda: play(num_blocks))


def recycle(env: Any, size: int, block_size: int, batch: int) -> Iterator[int]:
    """Batches of texts in a pool of `size` blocks that is full of cached ones: one that is found,
    and one that has never been seen, for whose blocks others must go.
    """
    allocator = env.solution.PrefixCachingAllocator(size, block_size)
    names = iter(range(10**12))

    def serve(text: int) -> Any:
        tokens = [text, *range(2 * block_size)]
        sequence = Sequence.of(asked({"prompt_ids": tokens}))
        allocator.admit(sequence)
        found = sequence.num_computed
        sequence.num_computed = len(tokens)
        allocator.publish(sequence)
        allocator.free(sequence.block_table)
        return found

    kept = next(names)
    for _ in range(size // 2):
        serve(next(names))
    serve(kept)
    while True:
        found = 0
        for _ in range(batch):
            found += serve(kept)
            serve(next(names))
        yield found
