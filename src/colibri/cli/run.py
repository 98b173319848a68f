"""`colibri run`: continues a prompt, or holds a conversation.

Owns: options and their combinations, reading prompts, the conversation loop.
Refuses: bounds of values (sampling.py and engine.py check them for API and command line alike).
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colibri.cli.report import (
    DenseType,
    ExpertPolicy,
    ExpertSlots,
    ExpertsType,
    KvType,
    LockMemory,
    MemoryLimit,
    NumaNode,
    OutputType,
    PinThreads,
    Prefetch,
    ReadLanes,
    Requantize,
    ResidencyKind,
    note,
    progress_bar,
    resolve_model,
)
from colibri.errors import ArgumentError, ContextFullError

if TYPE_CHECKING:
    from colibri.engine import Model
    from colibri.generate import Generation, Stream


def run_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help='A .colibri file, a Hugging Face directory, a GGUF file, or "demo".',
            show_default=False,
        ),
    ],
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help='Text to continue, or for a model with an encoder to read; "-" or none: standard input. '
            "With --chat: the first message.",
        ),
    ] = None,
    src_lang: Annotated[
        str | None, typer.Option(help="Language of the prompt, for a model that translates: eng_Latn.")
    ] = None,
    tgt_lang: Annotated[
        str | None, typer.Option(help="Language to write, for a model that translates: fra_Latn.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Hold a conversation; Ctrl-C stops an answer, Ctrl-D ends.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message of a conversation.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to write; none: to the end or the context.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: greedy. Default: the model's own, else 0.", show_default=False)
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the K most likely tokens; 0: off.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the most likely tokens up to this sum; 1: off.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below this share of the best; 0: off.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Weaken tokens that occurred; 1: off.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Repeats a text; none: a fresh one, shown by --stats.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be given often.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Weaken what has been written, once: -2 to 2; 0: off.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Weaken what has been written, each time: -2 to 2; 0: off.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=BIAS", help="Raise a token's logit; -100: never. May be given often."),
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The answer is JSON that matches this schema.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="The answer matches this regular expression as a whole.")
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The answer matches this grammar (Lark, llguidance).")
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(metavar="K", help="With --stats-json: log-probabilities, and those of the K best."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="1 to 256; none: the physical cores this process may use.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Most positions, prompt and answer together.")] = None,
    type: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Weight type to convert a directory or a GGUF file to: f32, bf16, q8, q6, q4.",
        ),
    ] = None,
    experts: ExpertsType = None,
    dense: DenseType = None,
    output: OutputType = None,
    requantize: Requantize = False,
    memory: MemoryLimit = None,
    residency: ResidencyKind = "auto",
    expert_slots: ExpertSlots = None,
    expert_policy: ExpertPolicy = None,
    lanes: ReadLanes = None,
    prefetch: Prefetch = None,
    kv_type: KvType = "f32",
    pin: PinThreads = False,
    numa: NumaNode = None,
    mlock: LockMemory = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show speed, memory and what streaming cost on stderr afterwards.")
    ] = False,
    stats_json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write these figures into a file, as a JSON object; it is replaced."
        ),
    ] = None,
) -> None:
    """Continue a prompt with a model, or hold a conversation (--chat). A model with an encoder reads the
    prompt and writes another text: a translation, a summary, a plain version."""
    from colibri.arguments import Opening
    from colibri.aside import check_place
    from colibri.engine import load
    from colibri.sampling import Sampling

    if system is not None and not chat:
        raise typer.BadParameter(
            "--system has no effect without --chat: add --chat, or put it into the prompt"
        )
    if chat and (src_lang is not None or tgt_lang is not None):
        raise typer.BadParameter("--src-lang and --tgt-lang have no effect with --chat: leave them out")
    if chat and prompt == "-":
        raise typer.BadParameter('with --chat, standard input holds the messages: leave "-" out')
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop or None,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": _biases(logit_bias) if logit_bias else None,
        "json_schema": None if json_schema is None else _json(json_schema),
        "regex": regex,
        "grammar": None if grammar is None else _text(grammar),
        "logprobs": logprobs,
    }
    if logprobs is not None and stats_json is None:
        raise typer.BadParameter("--logprobs has no effect without --stats-json, which they are written to")
    opening: dict[str, Any] = {
        "threads": threads,
        "context": context,
        "memory": memory,
        "residency": residency,
        "expert_slots": expert_slots,
        "expert_policy": expert_policy,
        "lanes": lanes,
        "prefetch": prefetch,
        "kv_type": kv_type,
        "pin": pin,
        "numa": numa,
        "mlock": mlock,
    }
    Sampling(**options)  # wrong values are told before a model is converted or loaded
    Opening(**opening)
    if stats_json is not None:
        check_place(stats_json)
    types = {"type": type, "experts": experts, "dense": dense, "output": output}
    if not chat:
        prompt = _prompt(prompt)
    file = resolve_model(model, types, requantize)
    with progress_bar(f"reading {file.name}") as bar:
        told = prefetch is not False or residency == "streamed"
        follow = (lambda done, total: bar(done, total, "")) if told else None
        opened = load(file, progress=follow, **opening)
    with opened:
        if chat:
            results = _converse(opened, prompt, system, options)
        else:
            assert prompt is not None
            results = [_answer(opened.stream(prompt, src_lang=src_lang, tgt_lang=tgt_lang, **options))]
        if results and (stats or stats_json is not None):
            _tell(opened, results, stats, stats_json)


def _biases(given: list[str]) -> dict[int, float]:
    found = {}
    for text in given:
        id, _, bias = text.partition("=")
        try:
            found[int(id)] = float(bias)
        except ValueError:
            raise ArgumentError(f"logit_bias: expected ID=BIAS such as 11=-5, found {text!r}") from None
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{file}: expected a text file in UTF-8: {error}") from None


def _json(file: Path) -> object:
    try:
        return json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{file}: expected JSON: {error}") from None


def _tell(model: Model, results: list[Generation], stats: bool, stats_json: Path | None) -> None:
    from colibri.cli.stats import figures, lines, write

    found = figures(model, results)
    for line in lines(found) if stats else ():
        note(line)
    if stats_json is not None:
        write(stats_json, found)


def _answer(stream: Stream) -> Generation:
    try:
        _show(stream)
    except KeyboardInterrupt:
        _end_line(stream.text)
        raise typer.Exit(130) from None
    _end_line(stream.text)
    if stream.result.n_generated == 0 and stream.result.finish_reason == "length":
        note("nothing was written: the prompt fills the context; open the model with a larger --context")
    return stream.result


def _converse(
    model: Model, first: str | None, system: str | None, options: dict[str, Any]
) -> list[Generation]:
    messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    results: list[Generation] = []
    interactive = sys.stdin.isatty()
    for text in _messages(first):
        messages.append({"role": "user", "content": text})
        stream: Stream | None = None
        try:
            stream = model.stream_chat(messages, **options)
            _show(stream)
            results.append(stream.result)
        except ContextFullError as error:
            if not interactive:
                raise
            note(f"{error}\nThis message was dropped; Ctrl-D ends the conversation.")
        except KeyboardInterrupt:
            note(" [stopped]", end="")
        answer = "" if stream is None else stream.text
        if answer:
            messages.append({"role": "assistant", "content": answer})
        else:
            messages.pop()  # nothing was answered: as if nothing had been asked
        if stream is not None:
            _end_line(answer)
    return results


def _show(stream: Stream) -> None:
    for piece in stream:
        sys.stdout.write(piece)
        sys.stdout.flush()


def _end_line(text: str) -> None:
    if not text.endswith("\n"):
        sys.stdout.write("\n")
    sys.stdout.flush()


def _messages(first: str | None) -> Iterator[str]:
    """What the user says, line by line, until the end of standard input."""
    if first is not None:
        yield first
    read = _reader()
    while True:
        try:
            line = read()
        except KeyboardInterrupt:
            note("\nCtrl-D ends the conversation.")
            continue
        if line is None:
            return
        if line.strip():
            yield line


def _reader() -> Callable[[], str | None]:
    """A function that gives the next line, or None at the end."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() a line editor and a history

        def ask() -> str | None:
            try:
                return input("> ")
            except EOFError:
                print()
                return None

        return ask

    def next_line() -> str | None:
        if sys.stdin.isatty():
            note("> ", end="")
        line = sys.stdin.buffer.readline()
        return _decoded(line).rstrip("\r\n") if line else None

    return next_line


def _prompt(prompt: str | None) -> str:
    """The argument, or standard input without its last line end."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter(
            "no prompt: give one, pipe one into standard input, or hold a conversation with --chat"
        )
    return _decoded(sys.stdin.buffer.read()).removesuffix("\n").removesuffix("\r")


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(
            f"standard input: expected UTF-8, found byte {data[error.start]:#04x} at offset {error.start}"
        ) from None
