"""Guess a number in four tries: an OpenEnv server to try, `python openenv_guess.py PORT` (docs/other_ecosystems.md)."""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **others):
        self.secret, self.tries = random.Random(seed).randint(1, 9), 0
        return Hint(text="Guess a number from 1 to 9.")

    def step(self, action, timeout_s=None, **others):
        self.tries += 1
        miss = abs(action.number - self.secret)
        text = "Right." if not miss else "Too low." if action.number < self.secret else "Too high."
        done = not miss or self.tries == 4
        return Hint(text=text, done=done, reward=max(0.0, 1 - miss / 9) if done else 0.0)

    @property
    def state(self):
        return State(step_count=self.tries)


app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=64)

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
