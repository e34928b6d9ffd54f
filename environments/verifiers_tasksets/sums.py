"""A taskset of verifiers v1, with nothing of Atropos in it: sums of one-digit numbers, and the last number counts."""

import re

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.stop
    async def after_one_answer(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        numbers = re.findall(r"\d+", trace.last_reply or "")
        return float(bool(numbers) and int(numbers[-1]) == self.data.answer)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(1, 10):
            for b in range(1, 10):
                yield SumTask(SumData(prompt=f"What is {a} + {b}?", answer=a + b), self.config.task)


__all__ = ["SumTaskset"]
