"""A checkpoint's tokenizer: text to token ids and back, and chats to token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers

from tvr.core.chat import ChatTemplate, check_messages
from tvr.core.control_tokens import ControlTokens, encode_beside
from tvr.core.detokenizer import Decoding, IncrementalDetokenizer
from tvr.core.tokenizer_files import TokenizerFiles
from tvr.errors import CheckpointError, RequestError


class Tokenizer:
    """Encodes as tokenizer.json and tokenizer_config.json say; safe to share among threads.

    Attributes:
        vocab_size: one more than the largest id the tokenizer knows. A model may have more; their
            ids decode to no text.
        bos_token_id: id of the token that begins a text; None: there is none.
        eos_token_ids: every id that ends an answer, from all files that name one.
        decoding: how ids become text; for `IncrementalDetokenizer`.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        """Put together what `files` says.

        Raises:
            CheckpointError: a BOS token is asked for and none is named.
        """
        self._files = files
        backend = self._backend = files.backend
        _mark_special(backend, [*files.special_tokens.values(), *files.extra_special_tokens])
        added = backend.get_added_tokens_decoder()
        self._special_ids = {t.content: i for i, t in added.items() if t.special}
        self._other_added = [t.content for t in added.values() if not t.special]
        model_size = backend.get_vocab_size(with_added_tokens=False)
        self.vocab_size: int = max(model_size, *(i + 1 for i in added), 0)

        bos, eos = (
            backend.token_to_id(files.special_tokens.get(name, ""))
            for name in ("bos_token", "eos_token")
        )
        self.bos_token_id: int | None = files.bos_token_id if bos is None else bos
        named = frozenset() if eos is None else frozenset([eos])
        self.eos_token_ids: frozenset[int] = files.eos_token_ids | named

        #: Whether tokenizer.json adds its special tokens; the config can forbid it.
        self._post_process = files.add_bos_token is not False
        self._add_bos = files.add_bos_token
        if self._add_bos is None:
            self._add_bos = backend.encode("").ids[:1] == [self.bos_token_id]
        if self._add_bos and self.bos_token_id is None:
            raise CheckpointError(
                "tokenizer_config.json has add_bos_token true but no file names a BOS token; set "
                "bos_token there"
            )
        self.decoding = Decoding(backend, frozenset(self._special_ids))
        self._chat = ChatTemplate(files.chat_templates, files.special_tokens)
        source = "\0".join(files.chat_templates.values())
        self._special = ControlTokens(backend, self._special_ids)
        # Some models' turn markers are added tokens not flagged special; the template has them.
        self._control = ControlTokens(
            backend, [*self._special_ids, *(t for t in self._other_added if t in source)]
        )

    @classmethod
    def from_dir(cls, path: str | PathLike[str]) -> Tokenizer:
        """Return the tokenizer of the checkpoint directory `path`.

        Raises:
            CheckpointError: no tokenizer.json, or a file that cannot be used.
        """
        return cls(TokenizerFiles.read(Path(path)))

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[TokenizerFiles]]:
        """Let another process have one that is put together there."""
        return Tokenizer, (self._files,)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be used."""
        return "default" in self._chat.sources

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n tokens has at most n times as many."""
        return max(map(len, self._backend.get_vocab()), default=1)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's own bytes, which may be a part of a character; b"" past the vocabulary.

        Raises:
            RequestError: a negative id.
        """
        return self.decoding.token_bytes(token_id)

    def special_token_id(self, text: str) -> int | None:
        """Return the id of the special token that reads `text`; None: there is none."""
        return self._special_ids.get(text)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            text: the prompt.
            add_special_tokens: begin with BOS if the model wants it; never a second one where the
                text itself begins with it.
            allow_special: special tokens written in the text become those tokens, as prompts for
                completion are used to; False: they stay the characters they are.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        if allow_special:
            post_process = add_special_tokens and self._post_process
            ids = self._encode(text, add_special_tokens=post_process)
        else:
            _check_unicode(text)
            ids = self._special.encode(self._special.mark(text))
        bos = self.bos_token_id
        if add_special_tokens and self._add_bos and bos is not None:
            if ids[:1] != [bos]:
                ids.insert(0, bos)
            elif ids[:2] == [bos, bos]:
                del ids[0]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`, the very text that streaming them gives.

        Ids past the vocabulary have no text.

        Raises:
            RequestError: a negative id.
        """
        detokenizer = IncrementalDetokenizer(
            self, skip_special_tokens=skip_special_tokens, prompt_token_ids=()
        )
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> list[int]:
        """Return the token ids of a conversation, laid out by the model's chat template.

        Special tokens are those the template writes, BOS among them; none are added. What users
        wrote is encoded as text, even where it reads like a control token.

        Args:
            messages: `{"role": str, "content": str or list of text parts}`, oldest first.
            add_generation_prompt: end with the opening of the assistant's turn.
            kwargs: variables for the template (`tools`, `documents`, `date_string`, ...).

        Raises:
            RequestError: messages of another form, no template, a template that refuses them, or
                text that is not valid Unicode.
        """
        given = check_messages(messages)
        # An assistant's own markup (a "<think>" that its template looks for) is not forgery.
        marked = [
            (self._special if m["role"] == "assistant" else self._control).mark(m) for m in given
        ]
        try:
            marked_kwargs = self._special.mark(kwargs)
            is_plain = marked == given and marked_kwargs == kwargs
        except RecursionError:
            raise RequestError(
                "the variables for the chat template are nested too deeply; send flatter ones"
            ) from None
        text = self._chat.render(
            marked, add_generation_prompt=add_generation_prompt, **marked_kwargs
        )
        if is_plain:
            return self._encode(text, add_special_tokens=False)
        _check_unicode(text)
        return self._control.encode(text)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        _check_unicode(text)
        return encode_beside(self._backend, text, add_special_tokens=add_special_tokens)


def _mark_special(backend: tokenizers.Tokenizer, texts: list[str]) -> None:
    """Flag the tokens that tokenizer_config.json names special; tokenizer.json may not."""
    added = {t.content: t for t in backend.get_added_tokens_decoder().values()}
    changed = []
    for text in dict.fromkeys(texts):
        token = added.get(text) or tokenizers.AddedToken(text, normalized=False)
        if not token.special and backend.token_to_id(text) is not None:
            changed.append(token)
    backend.add_special_tokens(changed)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise RequestError(
            f"the text has half a UTF-16 surrogate pair (U+{ord(text[e.start]):04X}) at character "
            f"{e.start}; send valid Unicode"
        ) from e
