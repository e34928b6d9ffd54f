"""A number is guessed in two turns. Put your own conversation in place of this one.

    user: I am thinking of a number from 1 to 9. Which one?   ─▶ It is 3.
    user: It is higher. Which one?                            ─▶ It is 7.     this guess is scored

A right first guess ends the conversation. Both turns are trained on; the environment's messages are not.
"""

from random import Random

from pydantic import Field

from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig, Rollout, Split, with_reply
from atroposlib.grading import last_number
from atroposlib.type_definitions import Messages

TURNS = 2


class GuessConfig(QuestionEnvConfig):
    """Each field is a flag: --env.largest 99."""

    max_new_tokens: int = Field(default=16, ge=1, description="Most tokens of one turn.")
    largest: int = Field(default=9, ge=2, le=10**6, description="Largest number.")


class GuessEnv(QuestionEnv):
    """A question is a number to guess."""

    name = "guess"
    env_config_cls = GuessConfig

    def secret(self, name: str) -> int:
        """A number, always the same for one name."""
        return Random(f"{self.config.seed} {name}").randint(1, self.config.largest)

    async def setup(self) -> None:
        """Numbers that the policy is measured with."""
        self.held_out = [self.secret(f"held out {number}") for number in range(self.config.held_out_limit)]

    async def training_item(self, number: int) -> int:
        """Question 0, 1, 2, ..."""
        return self.secret(str(number))

    def prompt(self, item: int) -> Messages:
        """Return what opens the conversation."""
        text = f"I am thinking of a number from 1 to {self.config.largest}. Which one?"
        return [{"role": "user", "content": text}]

    def hint(self, item: int, guess: str | None) -> str:
        """Return what the environment replies to a wrong guess."""
        if guess is None:
            return "Answer with a number."
        return f"It is {'higher' if float(guess) < item else 'lower'}. Which one?"

    async def rollouts(self, item: int, n: int, split: Split, temperature: float, top_p: float) -> list[Rollout]:
        """One conversation. `n` is always 1: each conversation of a group is a call of its own."""
        messages = self.conversation(item)  # `prompt`, and with --env.thinking_mode the request to think first
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for turn in range(1, TURNS + 1):
                reply = await managed.chat_completion(
                    messages=messages,
                    max_tokens=self.config.max_new_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    split=split,
                )
                text = reply.choices[0].message.content or ""
                messages = with_reply(messages, text)
                guess = last_number(text)
                if turn == TURNS or guess == str(item):
                    break
                messages.append({"role": "user", "content": self.hint(item, guess)})
            return [Rollout(text, messages, managed.get_state()["nodes"])]

    async def score(self, item: int, answer: str) -> float:
        """The reward of a conversation; `answer` is the text of its `Rollout`, here the last turn."""
        return float(last_number(answer) == str(item))

    def reference_answer(self, item: int) -> str:
        """The right answer, for people who read the samples."""
        return str(item)


if __name__ == "__main__":
    GuessEnv.cli(default_command="serve")
