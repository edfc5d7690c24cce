"""A model behind the API in one process, for programs that run the app themselves."""

from __future__ import annotations

from slipstream.llm import LLM
from slipstream.server.api import Api
from slipstream.server.backend import Limits
from slipstream.server.local import Local


class Server:
    """`app` is what an ASGI server runs. It shares Python's interpreter with the model: `run.Front` does not."""

    def __init__(self, llm: LLM, name: str, limits: Limits | None = None, key: str | None = None) -> None:
        """name: what clients call the model. key: what they must know, if anything."""
        self.backend = Local(llm, name, limits)
        self.llm, self.service = llm, self.backend.service
        self.app = Api(self.backend, self.backend.limits, key).app
