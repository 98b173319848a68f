"""What clients send to the interfaces of OpenAI: fields, types and bounds.

Owns: the schemas, which the OpenAPI page shows, and what becomes options of a text. A field that is not known
is an error that names it; one that is known and cannot matter here (who the user is) is taken and not used.
Refuses: values that engine and API check alike (sampling.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from colibri.sampling import MAX_SEED, Options
from colibri.server.failures import Failure

MAX_CHOICES = 128
Bounded = Annotated[int, Field(ge=1, le=MAX_CHOICES)]


class Body(BaseModel):
    """A JSON object whose every field is known and has the type that it should have."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class StructuredOutputs(Body):
    """vLLM's field: at most one of them."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None


class Sampled(Body):
    """Fields of every request that a text answers."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: Bounded | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    # Known, and without an effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    def options(self, defaults: Mapping[str, Any]) -> Options:
        """Of the text. Where neither request nor model (its defaults) has a temperature, it is 1, as the
        interface says. A seed and cuts cannot matter with temperature 0, but clients send them: they are left
        out then."""
        temperature = self.temperature
        if temperature is None and defaults.get("temperature") is None:
            temperature = 1.0
        greedy = (defaults["temperature"] if temperature is None else temperature) == 0
        found: Options = {
            "temperature": temperature,
            "top_p": None if greedy else self.top_p,
            "top_k": None if greedy else 0 if self.top_k == -1 else self.top_k,  # -1: off, in vLLM's way
            "min_p": None if greedy else self.min_p,
            "seed": None if greedy or self.seed is None else self.seed & MAX_SEED,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": _biases(self.logit_bias),
            "stop": self.stop or None,
        }
        return found | _constraint(self.structured_outputs)

    @property
    def usage_at_end(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise Failure(400, "stream_options has no effect without stream: true", param="stream_options")


class JsonSchema(Body):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def constraint(self) -> Options:
        if self.type == "json_schema":
            if self.json_schema is None or self.json_schema.schema_ is None:
                raise Failure(400, "response_format.json_schema.schema: expected a JSON schema, found none",
                              param="response_format")  # fmt: skip
            return {"json_schema": self.json_schema.schema_}
        if self.json_schema is not None:
            raise Failure(400, f"response_format.json_schema has no effect with type {self.type!r}",
                          param="response_format")  # fmt: skip
        return {"json_schema": True} if self.type == "json_object" else {}


class CompletionRequest(Sampled):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """Each of them."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if not given:
            raise Failure(400, "prompt: expected a text, a list of texts or of ids, found an empty list",
                          param="prompt")  # fmt: skip
        return [given] if isinstance(given[0], int) else given


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class Function(Body):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampled):
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]


def _biases(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    try:
        return {int(id): bias for id, bias in given.items()}
    except ValueError:
        raise Failure(400, f"logit_bias: expected token ids as keys, found {next(iter(given))!r}",
                      param="logit_bias") from None  # fmt: skip


def _constraint(given: StructuredOutputs | None) -> Options:
    if given is None:
        return {}
    found: Options = {}
    if given.json_ is not None:
        try:
            found["json_schema"] = json.loads(given.json_) if isinstance(given.json_, str) else given.json_
        except ValueError as error:
            raise Failure(400, f"structured_outputs.json: expected a JSON schema: {error}",
                          param="structured_outputs") from None  # fmt: skip
    if given.json_object:
        found["json_schema"] = True
    if given.regex is not None:
        found["regex"] = given.regex
    if given.grammar is not None:
        found["grammar"] = given.grammar
    if given.choice is not None:
        found["grammar"] = "start: " + " | ".join(map(_quoted, given.choice))
    return found


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
