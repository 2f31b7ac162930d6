"""What TensorRT-LLM decodes of this build: what is accepted, under load too, and the same texts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

from dflash_trt.build.acceptance_probe import PROMPTS, chat_prompts
from dflash_trt.chat import as_chat, has_channels, load_encoding
from dflash_trt.checkpoints import load_tokenizer
from dflash_trt.checkpoints.checks import Found, NotKnown, check
from dflash_trt.decoding import Grammar
from dflash_trt.doctor.patient import Patient, last_line
from dflash_trt.errors import RequestError
from dflash_trt.files import read_as
from dflash_trt.prompts import Prompt
from dflash_trt.serving.front import guide
from dflash_trt.tensorrt_llm import BundleInfo, first_generation
from dflash_trt.tensorrt_llm.first_generation import TOKENS, Case, Generated, Measured

TIMEOUT = 3600.0  # seconds, of a process
NOTHING = 1.2  # tokens a round: the drafter does not belong to the target, or gets no features
KEPT = 0.8  # of what is accepted one at a time: texts differ, and they are few
# at once, as far as the build has room: the texts of the last are compared with plain decoding's
LOADS = (8, 64)
TEXTS = 64
LONG = 8000  # tokens of the long prompt, at most
# nats: logits near 20 lie 0.125 apart in bfloat16, and kernels for one row and for a block add up
# in another order
NEAR_TIE = 0.5
NO_LENGTH = "See that engine.args leaves speculation on"
COLLAPSED = (
    "Check that target and drafter are the published pair (`dflash-trt inspect --deep` where it "
    "fits), and that engine.args does not turn on kv_cache_config.enable_block_reuse"
)
COLLAPSED_LONG = (
    "Either the drafter has not learnt prompts of this length: limit serving.max_seq_len; or "
    "TensorRT-LLM loses features of long prompts: see whether engine.args.enable_chunked_prefill "
    "changes it"
)
ONE = "one at a time"
LONG_PROMPT = "long prompt"
KINDS = ("tool call", "JSON", "guided JSON", LONG_PROMPT, "second turn")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "born": {"type": "integer"}},
    "required": ["name", "born"],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city on a day",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "day": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CITIES = ("Lyon", "Osaka", "Quito", "Tromso")


@check("error")
def generation(patient: Patient) -> Found:
    """Whether it decodes at all, and whether the drafter is worth its time."""
    made = _generated(patient, plain=False)
    if isinstance(made, Found):
        return made
    first = next(case for case in made.cases if case.name == ONE)
    tokens = sum(map(len, first.texts))
    what = f"{tokens} tokens of {len(first.texts)} prompts, loaded in {made.seconds:.0f} s"
    return judged(first, patient.info, what)


@check("error")
def acceptance_under_load(patient: Patient) -> Found:
    """Many at once may get another one's features, or none."""
    cases = [case for case in _drafted(patient) if case.name.endswith(" at once")]
    if [case.name for case in cases] == ["1 at once"]:
        raise NotKnown("the build decodes one sequence at a time")
    one = next(case for case in _drafted(patient) if case.name == ONE).acceptance_length or 0.0
    # where a schedule drafts less for many, less is accepted
    schedule = patient.args["speculative_config"].get("draft_len_schedule")
    return _lowest(cases, patient.info, 0.0 if schedule else KEPT * one)


@check("error")
def acceptance_by_kind(patient: Patient) -> Found:
    """Calls, JSON, long prompts and later turns are where features or masks go wrong."""
    return _lowest([case for case in _drafted(patient) if case.name in KINDS], patient.info)


@check("warning")
def greedy_texts(patient: Patient) -> Found:
    """Drafts must not change the text, but where two tokens are as good as equally likely."""
    drafted = next(case for case in reversed(_drafted(patient)) if case.name.endswith(" at once"))
    plain = _generated(patient, plain=True)
    if isinstance(plain, Found):
        raise NotKnown(f"without the drafter {plain.what}")
    for case in (drafted, plain.cases[0]):
        if case.error:
            raise NotKnown(f"{case.name}: {case.error}")
    return compared(drafted, plain.cases[0])


def judged(case: Measured, info: BundleInfo, what: str) -> Found:
    """What is accepted, against nothing at all and the lowest that is believed of this drafter."""
    if case.error:
        return Found(False, f"{case.name}: {case.error}", "Read the log of TensorRT-LLM")
    if case.acceptance_length is None:
        return Found(False, f"{what}; no round with drafts is reported", NO_LENGTH, "warning")
    what += f", {case.acceptance_length:.2f} tokens a round"
    if case.acceptance_length < NOTHING:
        return Found(False, f"{what}: hardly a draft is accepted", COLLAPSED)
    if not info.lowest:
        return Found(True, f"{what}; nothing is published for this pair to compare it with")
    what += f"; at least {info.lowest:.2f} is believed ({info.lowest_by})"
    return Found(case.acceptance_length >= info.lowest, what, COLLAPSED, "warning")


def _lowest(cases: Sequence[Measured], info: BundleInfo, least: float = 0.0) -> Found:
    """All cases in a sentence, judged by the worst; least: a further limit."""
    least = max(least, info.lowest)
    told = [f"{case.name} {case.error or f'{case.acceptance_length or 1:.2f}'}" for case in cases]
    what = f"tokens a round: {', '.join(told)}"
    low = [case.name for case in cases if (case.acceptance_length or 1.0) < NOTHING]
    if low == [LONG_PROMPT] and not any(case.error for case in cases):
        # as the pair's check of its context length: the text stays right, and others are fast
        return Found(False, what, COLLAPSED_LONG, "warning")
    if low or any(case.error for case in cases):
        return Found(False, what, COLLAPSED)
    if least:
        what += f"; at least {least:.2f} is believed"
    lowest = min(case.acceptance_length or 1.0 for case in cases)
    return Found(lowest >= least, what, COLLAPSED, "warning")


def compared(drafted: Measured, plain: Measured) -> Found:
    """How many texts are equal, where the others differ first, and whether by a near-tie."""
    differ = [
        (i, _first_difference(ours, its))
        for i, (ours, its) in enumerate(zip(drafted.texts, plain.texts, strict=True))
        if ours != its
    ]
    equal = len(plain.texts) - len(differ)
    what = f"{equal} of {len(plain.texts)} greedy texts are plain decoding's"
    if not differ:
        return Found(True, what)
    gaps = {(i, at): _gap(drafted, plain, i, at) for i, at in differ}
    first = min(at for _, at in differ)
    what += f"; the others differ first at token {first + 1} or later"
    if not any(plain.likeliest):
        why = "whether by near-ties is not known: TensorRT-LLM told no log-probabilities"
        return Found(False, f"{what}; {why}", "Compare the texts yourself")
    far = {place: gap for place, gap in gaps.items() if gap is None or gap > NEAR_TIE}
    if not far:
        most = max(gap for gap in gaps.values() if gap is not None)
        return Found(True, f"{what}, all at near-ties (up to {most:.2f} in log-probability)")
    (i, at), gap = next(iter(far.items()))
    how = "is not among plain decoding's likeliest" if gap is None else f"is {gap:.2f} behind"
    what += f", {len(far)} of them at no near-tie (text {i + 1}, token {at + 1}: the draft's {how})"
    fix = "Report it upstream with the build's arguments; without drafts texts are right"
    return Found(False, what, fix, "error" if len(far) > len(plain.texts) // 2 else "warning")


def _first_difference(ours: Sequence[int], its: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, its, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(its)))


def _gap(drafted: Measured, plain: Measured, i: int, at: int) -> float | None:
    """Log-probability, by plain decoding, between its token and the other one; None: far."""
    if i >= len(plain.likeliest) or max(len(drafted.texts[i]), len(plain.texts[i])) == at:
        return None
    known = plain.likeliest[i][at] if at < len(plain.likeliest[i]) else {}
    ends = [text[at] if at < len(text) else -1 for text in (plain.texts[i], drafted.texts[i])]
    own, other = map(known.get, ends)
    return None if own is None or other is None else own - other


def _drafted(patient: Patient) -> list[Measured]:
    made = _generated(patient, plain=False)
    if isinstance(made, Found):
        raise NotKnown("the generation failed")
    if not patient.args.get("speculative_config"):
        raise NotKnown("the build drafts nothing")
    return made.cases


def _cases(patient: Patient) -> Iterator[Case]:
    folder, args = patient.directory / "tokenizer", patient.args
    encode, most = load_encoding(folder), int(args.get("max_seq_len") or 1024) - TOKENS
    if not args.get("enable_chunked_prefill"):
        most = min(most, int(args.get("max_num_tokens") or 8192))
    most = max(most, 1)

    def case(name: str, prompts: Sequence[Prompt], **options: object) -> Case:
        ids = [encode(prompt)[-most:] for prompt in prompts]
        return Case(name, [each for each in ids if each], **options)  # type: ignore[arg-type]

    yield Case(ONE, chat_prompts(folder, most))
    slots = int(args.get("max_batch_size") or 1)
    texts = [f"Request {i}. {PROMPTS[i % len(PROMPTS)]}" for i in range(1, TEXTS + 1)]
    for at_once in sorted({min(load, slots) for load in LOADS}):
        count = TEXTS if at_once == min(LOADS[-1], slots) else 2 * at_once
        yield case(f"{at_once} at once", [*map(as_chat, texts[:count])], at_once=at_once)
    with_tool = load_encoding(folder, tools=[TOOL])
    asked = [with_tool(as_chat(f"What is the weather in {city} tomorrow?")) for city in CITIES]
    yield Case("tool call", [ids[-most:] for ids in asked])
    asked_json = [as_chat(f"Give name and year of birth of {x} as JSON.") for x in CITIES]
    if backend := args.get("guided_decoding_backend"):
        grammar = Grammar("json_schema", json.dumps(SCHEMA))
        with suppress(RequestError):  # a backend that cannot wait for a channel
            rule = guide(grammar, backend, channels=has_channels(load_tokenizer(folder)))
            yield case("guided JSON", asked_json, guide=rule)
    yield case("JSON", asked_json)
    lines = [f"{i}. {PROMPTS[i % len(PROMPTS)]}" for i in range(1, LONG // 8)]
    each = len(encode("\n".join(lines))) / len(lines)
    kept = lines[: max(int(min(most, LONG) * 0.9 / each), 1)]
    yield case(LONG_PROMPT, [as_chat("\n".join([*kept, "Answer the first of these."]))])
    turns = [{"role": "assistant", "content": "Yes."}, *as_chat("Explain it in more detail.")]
    yield case("second turn", [[*as_chat(text), *turns] for text in PROMPTS])


@cache
def _generated(patient: Patient, *, plain: bool) -> Generated | Found:
    """What TensorRT-LLM gave, in a process of its own; `Found`: why it did not."""
    info = patient.info
    if info.nodes > 1:
        raise NotKnown(f"it takes {info.nodes} machines, and this is one")
    cases = list(_cases(patient))
    if plain:
        cases = [case for case in cases if len(case.prompts) == TEXTS]
    runtime = Path(tempfile.mkdtemp(prefix="dflash-trt-doctor-"))
    result, log, asked = (runtime / name for name in ("result.json", "log", "cases.json"))
    asked.write_text(json.dumps([*map(asdict, cases)]))
    module, method = first_generation.__name__, "plain" if plain else "drafts"
    with log.open("wb") as stream, asked.open("rb") as given:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(patient.engine), str(result), method],
            stdin=given,
            stdout=stream,
            stderr=stream,
            env=os.environ | info.environment,
            start_new_session=True,  # its ranks are processes, too
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(TIMEOUT)
            late = process.poll() is None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if result.is_file():
        made = read_as(result, Generated)
        shutil.rmtree(runtime)
        return made
    said = last_line(log.read_text(errors="replace"))
    what = f"not done after {TIMEOUT:.0f} s" if late else "TensorRT-LLM ended"
    return Found(False, f"{what}: {said}", f"Read its log: {log}")
