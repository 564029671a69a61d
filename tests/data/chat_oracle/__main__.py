"""Write anew what transformers makes of the chat templates of trl: `make chat-oracle`, which installs both.

The templates are trl's (Apache License 2.0), kept as they are.
"""

from __future__ import annotations

import json
import lzma
import re
import sys
from collections.abc import Mapping
from datetime import date, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.data.chat_oracle.talks import ANSWERS, DAY, NAMED, TALKS, TEMPLATES, in_parts

SPECIAL = re.compile(
    r"<\|[^|>\s]{1,40}\|>|<｜[^｜]{1,40}｜>|</?s>|<(?:start|end)_of_(?:turn|utterance)>|<turn\|>|<\|turn>"
)


def fingerprint(value: Any) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:12]


def ask(tokenizer: Any, template: str, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[Any]]:
    """Return the text that transformers writes, and [hash of it, hash of ids and mask of its tokens]."""
    options = {"chat_template": template, "tools": tools}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    ids, mask = ([int(i) for i in encoded[name]] for name in ("input_ids", "assistant_masks"))
    return text, [fingerprint(text), fingerprint([ids, mask]) if sum(mask) else None]


def ask_either(tokenizer: Any, template: str, messages: list[dict[str, Any]], tools: Any) -> list[Any] | None:
    """Return what transformers makes of a conversation, True behind it if it wants contents in parts; None if it
    refuses it."""
    for parted in (False, True):
        try:
            text, answer = ask(tokenizer, template, in_parts(messages) if parted else messages, tools)
        except Exception as error:
            print(f"  refused{' in parts' if parted else ''}: {error}")
            continue
        if messages[-1]["content"] in text:
            return [*answer, parted]
    return None


def main(folder: Path) -> None:
    sys.path.append(str(folder))
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers.utils import chat_template_utils

    class Day(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return cls.fromisoformat(DAY)

    assert date.fromisoformat(DAY)
    chat_template_utils.datetime = Day
    templates = {path.stem: path.read_text() for path in sorted((folder / "trl/chat_templates").glob("*.jinja"))}
    special = sorted({token for text in templates.values() for token in SPECIAL.findall(text)} | {*NAMED.values()})
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(templates.values(), trainer)
    named = {f"{role}_token": token for role, token in NAMED.items()}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(bpe.to_str()), **named)
    answers: Mapping[str, Any] = {
        name: {talk: ask_either(tokenizer, text, *asked) for talk, asked in TALKS.items()}
        for name, text in templates.items()
    }
    kept = {"templates": templates, "tokenizer": json.dumps(json.loads(bpe.to_str()))}
    TEMPLATES.write_bytes(lzma.compress(json.dumps(kept).encode(), preset=9))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(some)}" for name, some in answers.items())
    ANSWERS.write_text(f"{{\n{lines}\n}}\n")
    print(f"{len(answers)} templates, transformers {transformers.__version__}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
