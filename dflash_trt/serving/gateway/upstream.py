"""A Triton and its build as the doors know them, and who is still with it."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol, Self

from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_trt.serving.gateway.door import State
from dflash_trt.serving.gateway.proxy import metrics_door, open_session, triton_door
from dflash_trt.serving.gateway.settings import Settings


class Leaving(Protocol):
    """A connection that its client is asked to leave: another one takes it to the next Triton."""

    def dismiss(self) -> None: ...


@dataclass(eq=False)
class Upstream:
    """doors: by the name of their listener. A request stays with the one that it began with."""

    grpc: int  # Triton's own port
    tls: bool
    doors: Mapping[str, ASGIApp]
    _stack: AsyncExitStack
    relays: set[Leaving] = field(default_factory=set)
    empty: asyncio.Event = field(default_factory=asyncio.Event)  # nobody is left, once retired
    _requests: int = 0
    _retired: bool = False

    @classmethod
    async def open(cls, settings: Settings, state: State) -> Self:
        """Raises DflashError when the build is none that the OpenAI door can serve."""
        triton, security = settings.triton, settings.security
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(open_session())
            doors: dict[str, ASGIApp] = {
                "http": triton_door(triton.http, security, state, session),
                "metrics": metrics_door(triton.metrics, state, session),
            }
            if "openai" in settings.listeners:
                from dflash_trt.serving.gateway.openai_door import (  # noqa: PLC0415
                    open_client,
                    openai_door,
                )

                client = await stack.enter_async_context(open_client(settings))
                # a tokenizer takes a moment to read: streams go on
                doors["openai"] = await asyncio.to_thread(openai_door, settings, state, client)
            return cls(triton.grpc, security.tls is not None, doors, stack.pop_all())

    async def answer(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._requests += 1
        try:
            await self.doors[name](scope, receive, send)
        finally:
            self._requests -= 1
            self._look()

    def leave(self, relay: Leaving) -> None:
        self.relays.discard(relay)
        self._look()

    def retire(self) -> None:
        """New requests go elsewhere; those that are here end here."""
        self._retired = True
        for relay in self.relays:
            relay.dismiss()
        self._look()

    async def close(self) -> None:
        await self._stack.aclose()

    def _look(self) -> None:
        if self._retired and not self._requests and not self.relays:
            self.empty.set()
