"""A taskset of verifiers with a tool: the model calls `add`, reads its result, and answers."""

import verifiers.v1 as vf


class AddData(vf.TaskData):
    a: int
    b: int


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class AddTask(vf.Task[AddData]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        used = any(str(self.data.a + self.data.b) in str(message.content) for message in trace.tool_messages)
        return float(used and str(self.data.a + self.data.b) in trace.last_reply)


class AddTaskset(vf.Taskset[AddTask, vf.TasksetConfig]):
    def load(self):
        for number in range(4):
            data = AddData(prompt=f"Add {number} and 5.", a=number, b=5)
            yield AddTask(data, self.config.task)


__all__ = ["AddTaskset"]

if __name__ == "__main__":  # verifiers starts the tool server so
    Calculator.run()
