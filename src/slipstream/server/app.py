"""The API and the model in one process, for programs that run the ASGI app themselves."""

from __future__ import annotations

from slipstream.llm import LLM
from slipstream.server.api import Api
from slipstream.server.backend import Limits
from slipstream.server.local import Local


class Server:
    """`app` is what an ASGI server runs. It shares the model's interpreter; `run.Front` has one of its own."""

    def __init__(self, llm: LLM, name: str, limits: Limits | None = None, key: str | None = None) -> None:
        """name: what clients call the model. key: the API key that they must send, or None."""
        self.backend = Local(llm, name, limits)
        self.llm, self.service = llm, self.backend.service
        self.app = Api(self.backend, self.backend.limits, key).app
