"""Make a small byte-level BPE tokenizer from instructions, one a line on standard input.

    python scripts/make_tokenizer.py vla_rl/assets/tiny_tokenizer/tokenizer.json \\
        < vla_rl/assets/tiny_tokenizer/instructions.txt

Any text can be encoded, because every byte is a token of its own. Ids 0, 1 and 2 are `<unk>`, `<s>`
and `</s>` as in Llama, and every text begins with `<s>`; the ids above `--size` stay free for
action tokens.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from vla_rl.models.prismatic.processor import format_prompt


def make_tokenizer(instructions: Sequence[str], size: int) -> Tokenizer:
    """Train on the prompts of these instructions until there are `size` tokens, or no pairs are
    left to merge.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [format_prompt(instruction) for instruction in instructions], trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the tokenizer.json to write")
    parser.add_argument(
        "--size", type=int, default=768, help="largest number of tokens (default: %(default)s)"
    )
    arguments = parser.parse_args()
    instructions = [line.strip() for line in sys.stdin if line.strip()]
    make_tokenizer(instructions, arguments.size).save(str(arguments.file))
    print(f"{arguments.file}: from {len(instructions)} instructions")


if __name__ == "__main__":
    main()
