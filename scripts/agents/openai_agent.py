"""An agent of openai-agents, which calls Responses: `python openai_agent.py TASK` (docs/agents.md)."""

import sys

from agents import Agent, Runner, set_tracing_disabled

set_tracing_disabled(True)
agent = Agent(name="Adder", instructions="Answer with the number alone.", model="any")
print(Runner.run_sync(agent, sys.argv[1], max_turns=3).final_output)
