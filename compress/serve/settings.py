"""The settings of a server: its name for the model, its keys, and its limits."""

from dataclasses import dataclass

from compress.errors import UsageError


@dataclass(frozen=True)
class ServerSettings:
    """The name, the keys and the limits of a server.

    - `model_name`: the name that clients give as `model`.
    - `api_keys`: a client must present one of them; without any, every client is served.
    - `max_queued`: texts that may wait for the engine, in addition to those that run.
    - `max_calls`: HTTP requests that are served at once, waiting ones included.
    - `max_connections`: open connections, idle ones included.
    - `max_body_bytes`: of one request; `max_held_bytes` of all bodies that are being read.
    - `max_choices`: texts of one request (`n` times the prompts); `max_call_tokens`: the sum of their
      `max_tokens`.
    - `max_scored_bytes`: logits of one prompt whose log probabilities are asked for.
    - `body_timeout_s`: the time in which a request must have arrived; `write_timeout_s`: how long a client
      may leave what it is sent unread; `request_timeout_s`: after which a text ends as it is (None: never).
    - `grace_s`: the time for running requests once the server is asked to stop.

    Raises:
        UsageError: a limit is not positive.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    max_queued: int = 2048
    max_calls: int = 4096
    max_connections: int = 8192
    max_body_bytes: int = 4 << 20
    max_held_bytes: int = 256 << 20
    max_choices: int = 128
    max_call_tokens: int = 1 << 20
    max_scored_bytes: int = 2 << 30
    body_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    request_timeout_s: float | None = None
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 < value < float("inf"):
                if name == "grace_s" and value == 0:
                    continue
                raise UsageError(f"{name} is {value}; it must be a positive number.")
        if not self.model_name:
            raise UsageError("the name of the served model is empty; give it one.")
