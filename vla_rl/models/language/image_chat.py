"""The chat template of a vision-language checkpoint.

    Message(images=(a,), content="Which colour?") ─► <image>Which colour? ─► the image's tokens, then text

Each image has one mark in the rendered text, which becomes all tokens of that image. These tokens go
to the engine and, with the images, into the step's observation: nothing is tokenized a second time.
"""

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from vla_rl.errors import ConversationRejected
from vla_rl.models.language.chat_format import ChatFormat
from vla_rl.models.language.images import ImageReader, require_image
from vla_rl.types import Message, ToolSpec


class ImageChatFormat(ChatFormat):
    """The chat template of one processor.

    Args:
        processor: a transformers processor with tokenizer and chat template.
        stop_tokens: tokens that end a reply.
        reader: knows how many tokens an image has.

    Raises: CheckpointError for a processor without a chat template.
    """

    def __init__(self, processor: Any, stop_tokens: frozenset[int], reader: ImageReader) -> None:
        super().__init__(processor.tokenizer, stop_tokens, processor.chat_template)
        self._reader = reader
        self._image_mark: str = processor.image_token
        video = getattr(processor, "video_token", None)
        self._marks = (processor.image_token, *([video] * (video is not None)))

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> np.ndarray:
        """Render the prompt of the next reply, int64 [P].

        Raises: ValueError if the template rejects the conversation.
        """
        return self._locate(messages, self.render_text(messages, tools, add_generation_prompt=True))

    def render_whole(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        """Render a conversation up to the end of its last message, int64 [P]."""
        return self._locate(
            messages, self.render_text(messages, tools, add_generation_prompt=False)
        )

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, add_generation_prompt: bool
    ) -> str:
        """Render a conversation as text, with one mark for each image.

        Raises: ValueError if the template rejects it, or describes no tools although there are some.
        """
        if tools and "tools" not in (self._choose_template(tools) or ""):
            raise ValueError(
                f"the conversation has {len(tools)} tools, but the chat template describes none to "
                "the policy; put a chat_template.jinja with tools beside the checkpoint's files"
            )
        return super().render_text(messages, tools, add_generation_prompt=add_generation_prompt)

    def tokenize(self, text: str) -> np.ndarray:
        """Tokenize plain text, int64 [P]; marks of images in it are text too."""
        return super().tokenize(self._harmless(text))

    def _given(self, message: Message) -> dict[str, Any]:
        # Every text is made harmless, tool results included: any of them may hold the letters of
        # a mark.
        given: dict[str, Any] = self._harmless(super()._given(message))
        if message.images or not self._takes_text:
            parts = [{"type": "image"} for _ in message.images]
            given["content"] = [*parts, {"type": "text", "text": given["content"]}]
        return given

    @functools.cached_property
    def _takes_text(self) -> bool:
        """Whether the template writes a content that is a text and no list of parts."""
        # SmolVLM's leaves out the whole text, in silence.
        try:
            one, other = (
                self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}],
                    chat_template=self._choose_template(()),
                    tokenize=False,
                )
                for text in ("?", "??")
            )
        except Exception:  # a template is a program, and not ours
            return False
        return bool(one != other)

    def _harmless(self, value: Any) -> Any:
        """Return plain values in which no text is a mark of an image."""
        if isinstance(value, dict):
            return {self._harmless(key): self._harmless(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._harmless(each) for each in value]
        if isinstance(value, str):
            for mark in self._marks:
                # a policy may write the mark's letters in a reply, and each mark has to be an image
                value = value.replace(mark, f"{mark[:1]} {mark[1:]}")
        return value

    def _locate(self, messages: Sequence[Message], text: str) -> np.ndarray:
        """Tokenize a rendered conversation, with all tokens of its images.

        Raises: ConversationRejected if it has other marks of images than one for each, or the texts
        that it begins with spell one.
        """
        self._require_no_marks(messages)
        images = [image for message in messages for image in message.images]
        for image in images:
            require_image(image)
        num_marks = text.count(self._image_mark)
        if num_marks != len(images):
            # a template that cuts thoughts out may join a mark of what was around them
            bare = [msgspec.structs.replace(message, images=()) for message in messages]
            text_without = self.render_text(bare, (), add_generation_prompt=False)
            raise ConversationRejected(
                f"the chat template rendered {num_marks} images of {len(images)}; expected one mark "
                f"{self._image_mark!r} for each. Does it show images of this role?",
                is_reply_at_fault=self._image_mark in text_without,
            )
        if not images:
            return self._tokens(text)
        # special tokens divide a text before anything else does, so its parts can be tokenized apart
        first, *rest = (self._tokens(part) for part in text.split(self._image_mark))
        parts = [first]
        for image, after in zip(images, rest, strict=True):
            parts += [self._reader.size_tokens(*image.shape[:2]), after]
        return np.concatenate(parts)

    def _require_no_marks(self, messages: Sequence[Message]) -> None:
        """Raise ConversationRejected if a text before the first reply spells the mark of an image."""
        # Later texts may repeat what the policy wrote, which must not end a run: a space is put into
        # the marks of these.
        for number, message in enumerate(messages):
            if message.role == "assistant":
                return
            if message.role != "tool" and self._image_mark in message.content:
                raise ConversationRejected(
                    f"the text of message {number} ({message.role}) spells {self._image_mark!r}, which "
                    "stands for an image; put images into Message.images, which stand before the "
                    "text, and leave the letters out",
                    is_reply_at_fault=False,
                )
