"""Every error detdiff raises on purpose: one class per broken rule, each message one paragraph.

A message says what was found, what was expected and what to do. ``exit_code`` follows diff(1): 2 is trouble,
3 is "nothing comparable".
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any


class DetdiffError(Exception):
    """Base of all errors that bad input or a broken environment can cause."""

    exit_code = 2


class NothingComparable(DetdiffError):
    """The two runs share nothing that could be compared; never reported as identical."""

    exit_code = 3


class WorkloadUnusable(DetdiffError):
    """A workload of a measurement says no lengths, or no distribution, that can be used."""


class PolicyUnusable(DetdiffError):
    """A policy of a measurement is none that the engine runs, or none that can be simulated."""


class GridUnusable(DetdiffError):
    """A grid of scenarios says axes, exclusions or pairs that make no sweep."""


class SweepFolderUnusable(DetdiffError):
    """The folder of a sweep is in use, holds something else, or cannot be written."""


class NotLocal(DetdiffError):
    """An address was given where only a file or folder of this machine can be."""


class SweepFailed(DetdiffError):
    """The workers of a sweep cannot be started."""


class WorkerLost(DetdiffError):
    """The process that ran a cell of a sweep ended before it answered."""


class RayMissing(DetdiffError):
    """A sweep is to run on Ray, which is not installed."""


class ScenarioError(DetdiffError):
    """A scenario file, flag or dataclass says something that cannot be run."""


class ScenarioFileError(ScenarioError):
    """A scenario file is not there, cannot be read, is not UTF-8 or is not TOML."""


class ScenarioKeyUnknown(ScenarioError):
    """A scenario, request, rule or flag names a key that does not exist."""


class ScenarioKeyMissing(ScenarioError):
    """A key without a default is absent."""


class ScenarioTypeError(ScenarioError):
    """A key's value is of another type than the key takes."""


class ScenarioRangeError(ScenarioError):
    """A value is of the right type and outside of what the key allows."""


class ScenarioConflict(ScenarioError):
    """Two settings are each allowed and contradict one another."""


class ScenarioFlagError(ScenarioError):
    """A text of flags cannot be split, repeats a key or has a key without its value."""


class RequestsMissing(ScenarioError):
    """A scenario has no request."""


class RequestIdRepeated(ScenarioError):
    """Two requests have one id."""


class PromptMissing(ScenarioError):
    """A request has an empty prompt, or neither prompt nor tokens."""


class PromptAmbiguous(ScenarioError):
    """A request has both prompt and tokens."""


class ModelError(DetdiffError):
    """A model directory is missing, incomplete or cannot be loaded."""


class ModelRunError(ModelError):
    """The model, or mlx-lm's generator, fails on a forward of the scenario."""


class ModelNotFound(ModelError):
    """There is no directory of the given name."""


class ModelNotADirectory(ModelError):
    """The given path is a file; a model is a directory."""


class ModelConfigMissing(ModelError):
    """A model directory has no config.json."""


class ModelConfigInvalid(ModelError):
    """config.json is not a JSON object, or lacks a value that its model type needs."""


class ModelCodeRefused(ModelError):
    """A model's own Python file was not allowed to run, or is not there."""


class ModelTypeUnknown(ModelError):
    """config.json names a model type for which mlx-lm has no module."""


class ModelWeightsMissing(ModelError):
    """A model directory has no safetensors file that mlx-lm would read."""


class ModelShardMissing(ModelError):
    """The index of a model's weights names a file that is not there."""


class ModelWeightsCorrupt(ModelError):
    """A safetensors file is cut short or its header does not describe it."""


class ModelWeightsMismatch(ModelError):
    """The arrays in the weight files are not those that the configuration asks for."""


class TokenizerMissing(ModelError):
    """A model directory has no tokenizer file."""


class TokenizerInvalid(ModelError):
    """A tokenizer does not load, or gives ids that the model has no embedding for."""


class AdapterInvalid(ModelError):
    """A directory holds no adapter that this model can be loaded with."""


class ModelUnreachable(ModelError):
    """A hub id could not be fetched and is not in the local cache."""


class ChatTemplateUnusable(ModelError):
    """A chat prompt was asked for and the tokenizer has no template, or its template refuses the prompt."""


class PromptWithoutTokens(ModelError):
    """The tokenizer made no token at all of a prompt."""


class GgufMissing(ModelError):
    """There is no GGUF file at the given path."""


class GgufCorrupt(ModelError):
    """A file is not GGUF, is cut short, or its header describes what cannot be there."""


class GgufUnsupported(ModelError):
    """A GGUF file holds something that the import does not know how to carry over exactly."""


class GgufPackageMissing(ModelError):
    """The `gguf` package is not installed, and a GGUF file cannot be read without it."""


class ImportTargetExists(ModelError):
    """The directory that an import should create is already there."""


class ImportNotWritten(ModelError):
    """The imported model could not be written, for example because the disk is full."""


class ContextExceeded(ScenarioError):
    """Prompt and answer together do not fit the model's context."""


class StopUnusable(ScenarioError):
    """A stop text becomes no token."""


class TokenOutOfRange(ScenarioError):
    """A token id that the model's vocabulary does not have."""


class DraftMismatch(ScenarioError):
    """A draft model whose vocabulary is not the model's."""


class ForcedTokensMissing(ScenarioError):
    """The trace whose tokens should be fed has no such request, another prompt, or no tokens for it."""


class LayoutError(DetdiffError):
    """A model cannot be run in the asked layout; names the module that prevents it."""


class KernelPlanError(DetdiffError):
    """A kernel plan names an unknown path or profile, or one that a site cannot take."""


class KernelsNotPinned(DetdiffError):
    """No policy, or not the one that was asked for, makes a model's rows depend on nothing but themselves here."""


class TraceError(DetdiffError):
    """A trace breaks a rule of its format, or cannot be written."""


class NotATrace(TraceError):
    """The path is not a directory that holds a readable trace.json."""


class StoreUnusable(TraceError):
    """An address is of no file system that fsspec knows, or of one whose library is not installed."""


class TraceHeaderError(TraceError):
    """trace.json is not a JSON object with the required fields."""


class TraceSchemaError(TraceError):
    """trace.json states another schema version than the one this program reads."""


class SiteListError(TraceError):
    """The list of sites is malformed, repeats a name or is not in execution order."""


class RequestListError(TraceError):
    """The list of requests is malformed or repeats an id."""


class LacksError(TraceError):
    """A trace says that it lacks something which it holds, or holds less than it says."""


class LogMissing(TraceError):
    """forwards.jsonl or texts.jsonl is not there, or is not a regular file."""


class LogSizeError(TraceError):
    """forwards.jsonl or texts.jsonl is not the file that the trace was completed with."""


class LogLineError(TraceError):
    """A line is not UTF-8 JSON, or the last line of a complete trace has no end."""


class ForwardLineError(TraceError):
    """A forward's line lacks a field, is out of order or names an unknown plan, request or phase."""


class PlanLineError(TraceError):
    """A plan's line lacks a field, is out of order or names sites that do not exist."""


class EventLineError(TraceError):
    """An event line lacks what its kind needs, or does not follow its forward."""


class TextLineError(TraceError):
    """A line of texts.jsonl is not [token id, text], or gives one id two texts."""


class ShardNameError(TraceError):
    """A shard's entry in trace.json is malformed or its name is not the next shard name."""


class ShardMissing(TraceError):
    """A shard is not there, or is not a regular file."""


class ShardSizeError(TraceError):
    """A shard's size is not the one that trace.json states, or it shrank while it was read."""


class ShardLengthError(TraceError):
    """A shard claims a header that does not fit in its file."""


class ShardHeaderError(TraceError):
    """A shard's header is not a JSON object of tensors with dtype, shape and data_offsets."""


class TensorNameError(TraceError):
    """A shard holds a tensor whose name the format does not know."""


class TensorTypeError(TraceError):
    """A tensor has an unknown dtype, or another one than its name demands."""


class TensorOffsetError(TraceError):
    """Tensors overlap, leave holes, pass the end of the file or do not have the bytes of their shape."""


class TensorMissing(TraceError):
    """A shard lacks a tensor that its other tensors need."""


class TensorShapeError(TraceError):
    """Tensors that describe the same rows disagree in length or rank."""


class TableError(TraceError):
    """A table does not give every port a column, or differs between shards."""


class RowError(TraceError):
    """A row names a request, forward, phase, table or position that does not exist."""


class GeneratedError(TraceError):
    """A generated token names what does not exist, or its top logits are not in order."""


class EmbeddingError(TraceError):
    """An embedding is of a request that does not exist or has one already, or its width is another."""


class ValueRowsError(TraceError):
    """A value's rows are not ascending rows of its own table."""


class ChecksumError(TraceError):
    """A file's bytes are not those that were written."""


class TraceReadError(TraceError):
    """The operating system refused to read a part of a trace."""


class TraceExists(TraceError):
    """A trace would be written over something that is already there."""


class TraceWriteError(TraceError):
    """The operating system refused to write a part of a trace."""


class TraceDiskFull(TraceWriteError):
    """There is no space left for a trace."""


class WriterClosed(TraceError):
    """A writer was used after it had finished, aborted or failed."""


class ReplayError(DetdiffError):
    """A re-run did not give the digests that the trace stored."""


class AnswerError(DetdiffError):
    """A JSON answer has another schema, or keys that its schema does not have."""


class CommandError(DetdiffError):
    """A command's arguments contradict one another, or something that it needs is not among them."""


class Interrupted(DetdiffError):
    """The user stopped a command; the message says what stays readable."""


class LibraryFailed(DetdiffError):
    """A library that runs models raised an exception of its own."""


class ReportNeeded(DetdiffError):
    """An error that detdiff does not expect: a fault of its own, or of a library it calls."""


class ProbeError(DetdiffError):
    """An operation cannot be probed as it was asked for."""


class ProbeTargetInvalid(ProbeError):
    """What should be probed is written in no form that exists, or with sizes that no operation has."""


class ProbeRowsInvalid(ProbeError):
    """The numbers of rows or of seeds are none that a probe can take."""


class ProbeBackendUnusable(ProbeError):
    """There is no such backend, or it cannot run this operation."""


class ProbeFunctionMissing(ProbeError):
    """A user's module or function is not there, cannot be imported, or is not callable."""


class ProbeFunctionFailed(ProbeError):
    """A user's function raised."""


class ProbeResultUnusable(ProbeError):
    """An operation returned something that has not one row for each that it was given."""


class ProbeSiteUnknown(ProbeError):
    """A model has no site of that name, or the site is no operation on rows alone."""


class ProfileQuestionError(DetdiffError):
    """`detdiff profiles` was asked about sizes that are missing, make no range, or do not go with the operation."""


class ProfileUnusable(DetdiffError):
    """A dispatch profile does not exist, breaks a rule, or has no such parameter or value."""


class OracleRefused(DetdiffError):
    """The float64 oracle cannot judge a site: a composite, a form that it does not know, or facts that are missing."""


class CheckError(DetdiffError):
    """A check of batch invariance cannot be made as it was asked for; it is never a pass."""


class NothingToCheck(CheckError):
    """A check that would compare nothing: no schedule, no layout, no prompt, too few requests, or no row in common."""


class ScheduleInvalid(CheckError):
    """A schedule or layout of a check is written in no form that exists."""


class CheckSubjectInvalid(CheckError):
    """What should be checked is no model, engine or operation that a check can run."""


class CheckSettingInvalid(CheckError):
    """A setting of a check, or of the pytest plugin, has a value that it cannot take."""


class AnswerOfOtherTraces(DetdiffError):
    """A comparison and two traces are given together, and the comparison is not of these traces."""


class ReductionError(DetdiffError):
    """A pair of runs cannot be reduced."""


class NothingToReduce(ReductionError):
    """Two runs that do not diverge, or that have nothing in common."""


class ReductionOfAnotherCase(ReductionError):
    """The folder of a reduction holds that of another pair, model, machine or choice."""


class ReductionFolderUnusable(ReductionError):
    """The folder of a reduction holds something else, or a damaged file."""


class EngineError(DetdiffError):
    """An engine cannot be opened, or cannot run what it was asked for."""


class EngineUnknown(EngineError):
    """There is no engine of that name, or no such factory."""


class ImportRefused(EngineError):
    """A module that was to be imported before a run cannot be."""


class EngineUnusable(EngineError):
    """What a factory returned is no engine, or a factory failed."""


class ProcessLost(EngineError):
    """One of several processes that run a model together ended, or was not heard of any more."""


class EngineRefuses(EngineError):
    """An engine cannot run a scenario: a schedule, a layout or a setting that it does not have."""


class EngineAnswerInvalid(EngineError):
    """An engine of the user's own answered in a form that is none: tokens, log-probabilities or tapped rows do not fit."""


class EngineFailed(EngineError):
    """An engine of the user's own raised an exception, or does not run the schedule that was asked for."""


class ServerAddressInvalid(EngineError):
    """The address of a server is none, or would give away what protects it."""


class ServerUnreachable(EngineError):
    """A server does not listen, its TLS fails, or it says nothing for too long. ``unsent``: it was not asked anything."""

    unsent = False


class ServerRefused(EngineError):
    """A server answered with a status other than 200, with an error, or is not the one that was opened."""


class ServerAnswerInvalid(EngineError):
    """What a server sent is cut, or has a form that is none: nothing is made of it."""


class LlamaLibraryRefused(DetdiffError):
    """The library of llama.cpp is not the one that the engine knows the structures of."""


class LlamaModelRefused(DetdiffError):
    """A file is no GGUF model that llama.cpp loads and the engine can trace."""


class LlamaFailed(DetdiffError):
    """llama.cpp gave up in the middle of a run."""


class ServeFailed(DetdiffError):
    """A server of ours cannot listen, or what it needs is not installed."""


class TorchMissing(DetdiffError):
    """torch or transformers is needed and is not installed."""


class LlamaMissing(DetdiffError):
    """llama.cpp's library is needed and is not installed."""


class HypothesisMissing(DetdiffError):
    """``detdiff.strategies`` is imported and hypothesis is not installed."""


# What running a model needs and reading traces does not.
RUNNING = frozenset(
    {"mlx", "mlx_lm", "numba", "safetensors", "transformers", "tokenizers", "huggingface_hub"}
)


def words_of(error: BaseException, longest: int = 300) -> str:
    """What an error says, on one line, cut where it is long and without the full stop that ends it."""
    text = " ".join(str(error).split()).rstrip(".") or "no message"
    return text if len(text) <= longest else f"{text[:longest]}..."


@dataclass(frozen=True)
class Failure:
    """``error`` is the class of the broken rule, ``message`` one paragraph without line breaks."""

    error: str
    message: str
    exit_code: int

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Any exception; one that detdiff does not raise on purpose is named by what the user can do."""
        if not isinstance(error, DetdiffError):
            error = _foreign(error)
        # A name of a file that is no UTF-8 comes as halves of surrogate pairs, which nothing that tells of it could write.
        words = str(error).encode("utf-8", "backslashreplace").decode("utf-8")
        return cls(type(error).__name__, " ".join(words.split()), error.exit_code)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "detdiff.error/1",
            "error": self.error,
            "message": self.message,
            "exit_code": self.exit_code,
        }


def library_lacks(error: ImportError) -> DetdiffError:
    """What an engine's library lacks, by the versions that run: for those who call from Python as on the command line."""
    return _foreign(error)


def _foreign(error: BaseException) -> DetdiffError:
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("Interrupted; nothing was written.")
    # mlx's own allocator reports with a plain RuntimeError.
    if isinstance(error, MemoryError) or "Unable to allocate" in str(error):
        return DetdiffError(
            "There is not enough memory. Lower memory_mb, record fewer values (capture digest, or a window), or "
            "use a smaller model."
        )
    if isinstance(error, ImportError) and (package := (error.name or "").partition(".")[0]) in RUNNING:
        if not isinstance(error, ModuleNotFoundError) or find_spec(package) is not None:
            return _another_version(package, error)
        return DetdiffError(
            f"Running a model (record, demo, --replay, and compare with anything but two traces) needs MLX and what "
            f"comes with it, and the package {str(error.name).partition('.')[0]!r} is not installed here. Install all "
            "of it with `pip install .` in the folder of detdiff's source. Comparing and showing traces works without."
        )
    if isinstance(error, OSError):
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return DetdiffError(
            f"{where}{error.strerror or error}. The operating system refused; check the path, its permissions and "
            "the space on the disk."
        )
    place = _library(error)
    if place is not None:
        return LibraryFailed(
            f"{place} raised {type(error).__name__} ({_reason(error)}) while it ran what it was given. A config.json that does not "
            "fit its model type or its weights does that: compare it with the original's, and try the model with the library "
            "alone. If it runs there, please report it with the traceback, which `detdiff --debug` and the same arguments show."
        )
    return ReportNeeded(
        f"This is a fault of detdiff or of a library that it calls, not of what you gave it: {type(error).__name__}, "
        f"{_reason(error)}. Please report it with the traceback, which "
        "`detdiff --debug` and the same arguments show."
    )


def _reason(error: BaseException) -> str:
    return str(error).rstrip(".") or "without a message"


def _another_version(package: str, error: ImportError) -> DetdiffError:
    """A library is there and lacks what detdiff imports from it."""
    from importlib import metadata  # --help does without

    name = package.replace("_", "-")
    try:
        version = metadata.version(name)
        wanted = [word for word in metadata.requires("detdiff") or () if re.match(rf"{name}\b(?!-)", word)]
    except metadata.PackageNotFoundError:
        version, wanted = "of an unknown version", []
    runs = wanted[0].partition(";")[0].strip() if wanted else name
    return DetdiffError(
        f"{name} {version} is installed, and detdiff runs with {runs}. This version does not have what detdiff needs of it: "
        f"{_reason(error)}. Install one that has: pip install --upgrade {shlex.quote(runs)}; or, if this one is newer than "
        "detdiff, a newer detdiff."
    )


def _library(error: BaseException) -> str | None:
    """The line of a library that raised ``error`` itself; None where it was a line of detdiff's."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    if step is None:
        return None
    module = str(step.tb_frame.f_globals.get("__name__"))
    return f"{module}, line {step.tb_lineno}," if module.partition(".")[0] in RUNNING - {"numba"} else None
