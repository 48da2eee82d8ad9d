"""LLM: the engine with a front door. `generate`, `stream` and `chat` for scripts."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from tvr.core.engine import Engine
from tvr.core.engine_config import EngineConfig
from tvr.core.loader import load_engine
from tvr.core.outputs import RequestOutput
from tvr.core.policy import SchedulingPolicy
from tvr.core.prompt import Prompt
from tvr.core.request import Request
from tvr.core.sampling_params import SamplingParams
from tvr.core.watcher import Watcher
from tvr.core.weights import Progress
from tvr.errors import ConfigError, RequestError


class LLM(Engine):
    """Loads and serves one model.

    `generate`, `stream` and `chat` drive the engine themselves; servers use `add_request`, `step`
    and `abort`. Use it as a context manager, or `close` it, to end its worker thread.

    Example:
        >>> llm = LLM("path/to/checkpoint")                                   # doctest: +SKIP
        >>> llm.generate("Once upon a time", SamplingParams(max_tokens=20))   # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        backend: str = "auto",
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory_fraction: float = 0.9,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        batch_invariant: bool = False,
        load_format: str = "auto",
        seed: int = 0,
        plugins: str | PathLike[str] | Iterable[object] | None = None,
        strict: bool = False,
        max_lag: int = 1,
        enforce_eager: bool = False,
        scheduling_policy: SchedulingPolicy | None = None,
        shadow: Watcher | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Load `model` and get ready to serve it.

        Args:
            model: directory of a Hugging Face checkpoint, or a GGUF file (see `open_checkpoint`),
                or the id of a model of the Hugging Face hub, from its cache or fetched.
            plugins: path of a plugins.toml, or plugin objects that rank before the configured
                ones; None: `./plugins.toml` if there is one, else the packaged default.
            progress: called with the bytes of weights read so far and the bytes there are.

        All other arguments are those of `EngineConfig`.

        Raises:
            ConfigError, CheckpointError, CapacityError, BackendUnavailable, UnsupportedSpec.
        """
        config = EngineConfig(
            backend=backend,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            memory_fraction=memory_fraction,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            batch_invariant=batch_invariant,
            load_format=load_format,
            seed=seed,
            strict=strict,
            max_lag=max_lag,
            enforce_eager=enforce_eager,
            scheduling_policy=scheduling_policy,
            shadow=shadow,
        )
        super().__init__(config, load_engine(model, config, plugins, progress))
        self._ids = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Return one finished output for each prompt, in order.

        Args:
            prompts: one prompt or a list of them. A list of ints is one prompt of token ids.
            sampling_params: one for all, or one for each prompt.

        Raises:
            RequestError: some prompt can never be served; nothing is started then.
            OpFault: `shadow` found an op at fault.
        """
        many = isinstance(prompts, (list, tuple)) and not (prompts and isinstance(prompts[0], int))
        batch: list[Any] = list(prompts) if many else [prompts]
        if isinstance(sampling_params, Sequence):
            params: list[SamplingParams | None] = list(sampling_params)
        else:
            params = [sampling_params] * len(batch)
        if len(params) != len(batch):
            raise RequestError(
                f"{len(batch)} prompts came with {len(params)} sampling_params; "
                "give one for all or one for each"
            )
        requests: list[Request] = []
        try:
            for prompt, p in zip(batch, params, strict=True):
                requests.append(self._follow(prompt, p))
            for request in requests:
                while not request.output.finished:
                    self._drive()
        finally:
            self._conclude(requests)
        return [r.output for r in requests]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yield the output of one prompt each time it has grown; the last one is finished.

        Closing the iterator aborts the request. Several streams may be consumed in turn. Raises as
        `generate` does.
        """
        request = self._follow(prompt, sampling_params)
        output, seen = request.output, 0
        try:
            while not output.finished:
                self._drive()
                progress = sum(len(o.token_ids) for o in output.outputs) + output.finished
                if progress > seen:
                    seen = progress
                    yield output
        finally:
            self._conclude([request])

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        **template_kwargs: Any,  # noqa: ANN401
    ) -> list[RequestOutput]:
        """Return the finished answer to each conversation, laid out by the model's chat template.

        Args:
            messages: one conversation or a list of them; a message is
                `{"role": ..., "content": ...}`.
            sampling_params: one for all, or one for each conversation.
            template_kwargs: further variables of the template.

        Raises:
            RequestError: messages the template or the engine refuses; nothing is started then.
        """
        one = not messages or isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if one else list(messages)
        prompts: list[Prompt] = [self.chat_prompt(c, **template_kwargs) for c in conversations]
        return self.generate(prompts, sampling_params)

    def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        **template_kwargs: Any,  # noqa: ANN401
    ) -> list[int]:
        """Return the token ids of a conversation, ending where the answer begins."""
        if self.tokenizer is None:
            raise ConfigError("chat needs a tokenizer, and the checkpoint has none")
        return self.tokenizer.apply_chat_template(messages, **template_kwargs)

    def _follow(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        """Queue a request whose outputs `generate` or `stream` will hand out itself."""
        request_id = f"tvr-{next(self._ids)}"
        while self._is_live(request_id):  # a user's own id may read like ours
            request_id = f"tvr-{next(self._ids)}"
        return self._enqueue(request_id, prompt, params, followed=True)
