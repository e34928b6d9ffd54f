"""mini-swe-agent, which calls Chat Completions by litellm and runs the commands that the model writes:
`python mini_swe.py TASK` (docs/agents.md).
"""

import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

FENCE = "`" * 3
ASKED = f"""{{{{task}}}}
Answer like this, with the result in place of N:
{FENCE}mswea_bash_command
echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo N
{FENCE}"""
model = LitellmTextbasedModel(model_name="openai/any", cost_tracking="ignore_errors")
agent = DefaultAgent(
    model,
    LocalEnvironment(timeout=10),
    system_template="You answer with one command.",
    instance_template=ASKED,
    step_limit=2,
)
print(agent.run(sys.argv[1])["submission"])
