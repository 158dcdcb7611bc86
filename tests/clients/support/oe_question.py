"""An environment of OpenEnv whose action is a text: a sum, by the seed."""

from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Answer(Action):
    answer: str


class Question(Observation):
    question: str | None = None


class SumEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, largest: int = 9) -> Question:
        self._left = (seed or 0) % (largest + 1)
        self._state = State()
        return Question(question=f"What is {self._left} plus 3?")

    def step(self, action: Answer) -> Question:
        self._state.step_count += 1
        is_right = action.answer.strip() == str(self._left + 3)
        return Question(done=is_right, reward=float(is_right), question="Try again.")

    @property
    def state(self) -> State:
        return self._state


app = create_app(SumEnvironment, Answer, Question, env_name="sums", max_concurrent_envs=4)
