"""Virtual time: exact, in order, and over at once."""

from __future__ import annotations

import asyncio
import time

import pytest

from course.load.virtual_time import Deadlock, VirtualTimeLoop, run


def now() -> float:
    return asyncio.get_running_loop().time()


def test_an_hour_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600.0)
        return now()

    start = time.monotonic()
    assert run(main()) == 3600.0
    assert time.monotonic() - start < 5.0


def test_tasks_take_turns_as_their_times_come() -> None:
    async def main() -> list[tuple[str, float]]:
        seen = []

        async def every(name: str, period: float) -> None:
            for _ in range(4):
                await asyncio.sleep(period)
                seen.append((name, now()))

        async with asyncio.TaskGroup() as group:
            group.create_task(every("a", 3 / 1024))
            group.create_task(every("b", 7 / 1024))
        return seen

    seen = run(main())
    assert [1024 * when for _, when in seen] == [3, 6, 7, 9, 12, 14, 21, 28]  # exactly
    assert [name for name, _ in seen] == list("aabaabbb")


def test_what_asyncio_offers_works() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.Event().wait()
        queue: asyncio.Queue[int] = asyncio.Queue()
        asyncio.get_running_loop().call_later(0.5, queue.put_nowait, 1)
        await queue.get()
        return now()

    assert run(main()) == 2.5


def test_computing_takes_time_only_if_it_is_said() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        late = asyncio.create_task(asyncio.sleep(0.25))
        await asyncio.sleep(0)
        loop.advance(1.0)
        await late
        return now(), loop.time()

    assert run(main()) == (1.0, 1.0)


def test_waiting_for_nothing_is_an_error() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="every task waits"):
        run(main())


def test_each_run_begins_at_zero() -> None:
    async def main() -> float:
        before = now()
        await asyncio.sleep(1.0)
        return before

    assert [run(main()), run(main())] == [0.0, 0.0]
