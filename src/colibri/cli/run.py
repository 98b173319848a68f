"""`colibri run`: continues a prompt, or holds a conversation.

Owns: options and their combinations, reading prompts, the conversation loop, the figures of --stats.
Refuses: bounds of values (sampling.py and engine.py check them for API and command line alike).
"""

from __future__ import annotations

import contextlib
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
    MemoryLimit,
    OutputType,
    PinThreads,
    ReadLanes,
    Requantize,
    ResidencyKind,
    bytes_text,
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
    prefetch: Annotated[
        bool, typer.Option(help="Read mapped weights ahead, while the model is in use already.")
    ] = True,
    pin: PinThreads = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show speed and memory on stderr afterwards.")
    ] = False,
) -> None:
    """Continue a prompt with a model, or hold a conversation (--chat). A model with an encoder reads the
    prompt and writes another text: a translation, a summary, a plain version."""
    from colibri.arguments import Opening
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
    }
    opening: dict[str, Any] = {
        "threads": threads,
        "context": context,
        "memory": memory,
        "residency": residency,
        "expert_slots": expert_slots,
        "expert_policy": expert_policy,
        "lanes": lanes,
        "prefetch": prefetch,
        "pin": pin,
    }
    Sampling(**options)  # wrong values are told before a model is converted or loaded
    Opening(**opening)
    types = {"type": type, "experts": experts, "dense": dense, "output": output}
    if not chat:
        prompt = _prompt(prompt)
    file = resolve_model(model, types, requantize)
    with progress_bar(f"reading {file.name}") as bar:
        follow = (lambda done, total: bar(done, total, "")) if prefetch else None
        opened = load(file, progress=follow, **opening)
    with opened:
        if chat:
            _converse(opened, prompt, system, options, stats)
            return
        assert prompt is not None
        _answer(opened, opened.stream(prompt, src_lang=src_lang, tgt_lang=tgt_lang, **options), stats)


def _answer(model: Model, stream: Stream, stats: bool) -> None:
    try:
        _show(stream)
    except KeyboardInterrupt:
        _end_line(stream.text)
        raise typer.Exit(130) from None
    _end_line(stream.text)
    if stream.result.n_generated == 0 and stream.result.finish_reason == "length":
        note("nothing was written: the prompt fills the context; open the model with a larger --context")
    if stats:
        _show_stats(model, [stream.result])


def _converse(
    model: Model, first: str | None, system: str | None, options: dict[str, Any], stats: bool
) -> None:
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
    if stats and results:
        _show_stats(model, results)


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


def _show_stats(model: Model, results: list[Generation]) -> None:
    """Speed of all answers together, then memory by category."""
    evaluated = sum(result.n_prompt - result.n_reused for result in results if result.prefill_seconds)
    decoded = sum(max(0, result.n_generated - 1) for result in results)
    prefill = sum(result.prefill_seconds for result in results)
    decode = sum(result.decode_seconds for result in results)
    last = results[-1]
    memory = model.memory
    note(f"prompt    {evaluated} tokens, {_speed(evaluated, prefill)}")
    note(
        f"answer    {sum(r.n_generated for r in results)} tokens, {_speed(decoded, decode)}, end: "
        f"{last.finish_reason}"
    )
    note(f"engine    {model.isa}, threads {model.threads}, context {model.context}, seed {_seed(last)}")
    if model.residency == "streamed":
        traffic = model.stats
        uses = int(traffic.hits.sum() + traffic.misses.sum())
        note(
            f"experts   {memory.expert_slots} of {sum(model.config['n_experts'])} in slots, hit rate "
            f"{100 * traffic.hit_rate:.1f} % of {uses} uses, {bytes_text(int(traffic.bytes_per_token))} read "
            f"per token, waited {int(traffic.wait_ns.sum()) / 1e9:.2f} s"
        )
    note(
        f"memory    {bytes_text(memory.total_bytes)} planned ({model.residency}): process "
        f"{bytes_text(memory.process)}, expert cache {bytes_text(memory.expert_cache)}, weights "
        f"{bytes_text(memory.weights_mapped)} mapped and {bytes_text(memory.weights_resident)} resident, "
        f"model {bytes_text(memory.model)}, KV cache {bytes_text(memory.kv_cache)}, activations "
        f"{bytes_text(memory.activations)}, sampling {bytes_text(memory.sampling)}, threads "
        f"{bytes_text(memory.threads)}, control {bytes_text(memory.control)}"
    )
    peak = _peak_bytes()
    if peak is not None:
        note(f"peak      {bytes_text(peak)} resident, Python included")


def _speed(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tok/s" if tokens and seconds else "no time measured"


def _seed(result: Generation) -> str:
    return "none (greedy)" if result.seed is None else str(result.seed)


def _peak_bytes() -> int | None:
    """Largest resident size of this process so far; None where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    return None
