"""The cells of a sweep as tasks of a Ray cluster: what they need of it, what is shipped to it, and traces there and back."""

from __future__ import annotations

import atexit
import fcntl
import io
import os
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from detdiff.engines.registry import import_before_runs
from detdiff.errors import Failure, RayMissing, SweepFailed, words_of

from .cells import CompareTask, RecordTask, SweepFolder, Task, TaskResult, memory_of, run_task, without_places
from .grid import Needs
from .run import THREADS

LOCAL: Final = "local"
_PACKAGES: Final = ("detdiff", "detdiff_kernels")
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
_SCRATCH: Final = "detdiff-sweep-"
_OWN: list[tuple[Path, int]] = []


class RayWorkers:
    """Workers of a cluster at ``address`` ("local": one that is started here, and ended with the sweep).

    Every task asks for what ``needs`` says, and for as much memory as its model's size makes it take. Another machine is shipped this
    detdiff, as its source is here, and the modules of ``imports``. Traces and answers end in ``folder``, on this machine; a
    worker, or an object, that is lost costs one task. Raises RayMissing and SweepFailed.
    """

    def __init__(
        self,
        folder: SweepFolder,
        address: str,
        needs: Needs,
        slots: int | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        try:
            import ray
        except ImportError:
            raise RayMissing(
                "--ray runs the cells on a Ray cluster, and the package ray is not installed here; expected it. Install "
                "pip install 'detdiff[ray]', or use --jobs."
            ) from None
        self._ray = ray
        self._folder, self._needs, self._imports = folder, needs, tuple(imports)
        self._own = not ray.is_initialized()
        environment = {name: os.environ.get(name, "1") for name in THREADS}
        shipped: dict[str, Any] = {"env_vars": {**environment, "PYTHONPATH": _python_path()}}
        where: dict[str, Any] = {"include_dashboard": False}
        if address != LOCAL:
            shipped["py_modules"] = _shipped(imports)
            where = {"address": address}
        try:
            # A program that has begun with Ray has said already what its workers get.
            if self._own:
                ray.init(logging_level="error", log_to_driver=False, runtime_env=shipped, **where)
            self._nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        except Exception as error:  # a cluster may fail to start, or to answer, in any way
            raise SweepFailed(
                f"The Ray cluster {address!r} cannot be used ({type(error).__name__}: {words_of(error)}); expected one that runs there, or "
                "that can be started here. Correct the address, or use --jobs."
            ) from error
        processors = sum(node.get("CPU", 0) for node in self._nodes)
        self.slots = slots or max(1, int(processors // max(needs.cpus, 0.01)))
        self._packed: dict[str, Any] = {}
        self._running: dict[Any, Task] = {}
        self._refused: list[tuple[Task, TaskResult | None]] = []
        # Lost workers are counted, and run again, by the sweep: the same as with processes.
        self._remote = ray.remote(max_retries=0, num_returns=2)(run_on_worker)

    def open_engine(self) -> str | None:
        """Ray chooses the worker."""
        return None

    def start(self, task: Task) -> None:
        scenario = task.scenario if isinstance(task, RecordTask) else task.pair.b.scenario
        mebibytes = self._needs.memory_mb
        memory = memory_of(scenario) if mebibytes is None else mebibytes << 20
        asked = {"CPU": self._needs.cpus, "GPU": self._needs.gpus, "memory": memory}
        if not any(
            all(node.get(name, 0) >= amount for name, amount in asked.items()) for node in self._nodes
        ):
            failure = Failure.of(SweepFailed(_no_room(asked, self._nodes)))
            self._refused.append((task, TaskResult(failure=failure)))
            return
        traces = []
        try:
            if isinstance(task, CompareTask):
                names = dict.fromkeys((task.pair.a.recording, task.pair.b.recording))
                traces = [self._trace(name) for name in names]
        except (OSError, self._ray.exceptions.RayError) as error:
            # A trace that is not there any more, or that the cluster's store has no room for.
            self._refused.append((task, self._told(error)))
            return
        remote = self._remote.options(num_cpus=self._needs.cpus, num_gpus=self._needs.gpus, memory=memory)
        result, packed = remote.remote(task, self._imports, *traces)
        self._running[result] = task
        self._packed[task.name + _of(task)] = packed

    def _trace(self, name: str) -> Any:
        """A recording in the cluster's store: this process owns it, so that no worker can take it along."""
        if name not in self._packed:
            self._packed[name] = self._ray.put(packed(self._folder.trace(name)))
        return self._packed[name]

    def finished(self) -> list[tuple[Task, TaskResult | None]]:
        if self._refused:
            found, self._refused = self._refused, []
            return found
        if not self._running:
            return []
        ended, _ = self._ray.wait(list(self._running), num_returns=1)
        made: list[tuple[Task, TaskResult | None]] = []
        for each in ended:
            task = self._running.pop(each)
            reference = self._packed.pop(task.name + _of(task))
            try:
                result = self._ray.get(each)
                if isinstance(task, RecordTask) and result.failure is None:
                    unpacked(self._ray.get(reference), self._folder.trace(task.name))
            except self._ray.exceptions.RayTaskError as error:
                # Raised beside the cell, as where the machine's disk is full.
                result = self._told(error.cause)
            except self._ray.exceptions.RayError:
                # A worker, its machine, or an object that was lost; what a cell does wrong is in its result.
                if isinstance(task, CompareTask):
                    for cell in (task.pair.a, task.pair.b):
                        self._packed.pop(cell.recording, None)
                result = None
            except OSError as error:
                result = self._told(error)
            made.append((task, result))
        return made

    def _told(self, error: BaseException) -> TaskResult:
        return TaskResult(failure=without_places(Failure.of(error), {f"{self._folder.path}{os.sep}": ""}))

    def close(self, now: bool) -> None:
        for each in self._running if now else ():
            self._ray.cancel(each, force=True)
        self._packed.clear()
        if self._own:
            self._ray.shutdown()


def _of(task: Task) -> str:
    return "/record" if isinstance(task, RecordTask) else "/compare"


def _no_room(asked: dict[str, float], nodes: Sequence[dict[str, float]]) -> str:
    said = f"{asked['CPU']:g} processors, {asked['GPU']:g} GPUs and {asked['memory'] / (1 << 20):,.0f} MiB of memory"
    most = max(nodes, key=lambda node: node.get("memory", 0), default={})
    there = f"{most.get('CPU', 0):g}, {most.get('GPU', 0):g} and {most.get('memory', 0) / (1 << 20):,.0f} MiB"
    return (
        f"The cell asks for {said}, and no machine of the cluster has them (the largest has {there}); expected one. Say with [needs] what it "
        "takes, or add a machine."
    )


def _python_path() -> str:
    """Modules of the folder that the sweep was started in are found as they are here."""
    return os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH", ""))))


def _shipped(imports: Sequence[str]) -> list[str]:
    """The folders and files of detdiff and of modules of the user's, for another machine."""
    found = []
    for name in (*_PACKAGES, *dict.fromkeys(each.partition(".")[0] for each in imports)):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise SweepFailed(
                f"The module {name!r} has no source that could be shipped to a cluster; expected a file or a folder. Install it there."
            )
        path = Path(spec.origin)
        found.append(str(path.parent if path.name == "__init__.py" else path))
    return found


def packed(trace: Path) -> bytes:
    """A trace's files as one object, the same bytes for the same trace."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(trace.iterdir()):
            archive.writestr(zipfile.ZipInfo(path.name, _EPOCH), path.read_bytes())
    return data.getvalue()


def unpacked(data: bytes, trace: Path) -> None:
    """Write a trace's files into the new folder ``trace``, whole or not at all. Raises OSError."""
    trace.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{trace.name}.", dir=trace.parent) as folder:
        place = Path(folder) / "trace"
        place.mkdir()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name in archive.namelist():
                (place / name).write_bytes(archive.read(name))
        shutil.rmtree(trace, ignore_errors=True)
        os.replace(place, trace)


def own_folder() -> Path:
    """Where this process keeps what it needs for a moment. It holds a lock on it, and removes those that nobody holds: a worker
    that is killed, or ended with its cluster, removes nothing."""
    if not _OWN:
        root = Path(tempfile.gettempdir())
        for left in root.glob(f"{_SCRATCH}*"):
            with suppress(OSError):
                os.close(_locked(left))
                shutil.rmtree(left, ignore_errors=True)
        # Locked before it has the name by which others look for it.
        new = Path(tempfile.mkdtemp(prefix=".detdiff-", dir=root))
        mine = root / f"{_SCRATCH}{new.name.rpartition('-')[2]}"
        _OWN.append((mine, _locked(new)))
        os.replace(new, mine)
        atexit.register(shutil.rmtree, mine, ignore_errors=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(mine)
    return _OWN[0][0]


def _locked(folder: Path) -> int:
    """A handle that holds the folder's lock. Raises OSError where another process holds it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def run_on_worker(task: Task, imports: Sequence[str], *traces: bytes) -> tuple[TaskResult, bytes]:
    """One task in a worker, whose engines stay open; a recording's trace comes back with it."""
    for name in imports:
        import_before_runs(name)
    with tempfile.TemporaryDirectory(dir=own_folder()) as place:
        folder = SweepFolder(Path(place))
        if isinstance(task, CompareTask):
            names = dict.fromkeys((task.pair.a.recording, task.pair.b.recording))
            for name, data in zip(names, traces, strict=True):
                unpacked(data, folder.trace(name))
        result = run_task(task, folder.path)
        done = isinstance(task, RecordTask) and result.failure is None
        return result, packed(folder.trace(task.name)) if done else b""
