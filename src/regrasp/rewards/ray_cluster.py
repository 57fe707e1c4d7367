"""A Ray cluster: found or started here, and left as it was found."""

import contextlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrasp.core.errors import ConfigError, one_line
from regrasp.rewards.engine import EngineUnavailable

LOCAL = "local"
AUTO = "auto"
ANSWER_S = 5.0
"""How long an address may take to answer."""
_STORE_BYTES = 100 << 20
"""Of the object store of a cluster that is started here: it holds the jobs, never a frame."""
_PREFIX = "regrasp-ray-"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a cluster has."""

    machines: int
    gpus: int


class Cluster:
    """A Ray cluster.

    Args:
        address: HOST:PORT, "auto" for the one that runs on this machine, or "local" to start one.

    Raises:
        ConfigError: Ray is not installed, or the address cannot be understood.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        host, colon, port = address.rpartition(":")
        if address not in (LOCAL, AUTO) and not (colon and host and port.isdigit() and "//" not in host):
            message = (
                f"--ray is HOST:PORT of a cluster's head, auto for the cluster of this machine, or local; found "
                f"{address!r}. Mend: correct it; for a distant cluster, first run `ray start --address HOST:PORT` here."
            )
            raise ConfigError(message)
        try:
            import ray
            from ray import exceptions
        except ImportError as error:
            message = f"--ray needs Ray, which is not installed ({error}). Mend: pip install 'regrasp[ray]'."
            raise ConfigError(message) from error
        self._ray, self._error = ray, exceptions.RayError
        self._folder: Path | None = None
        self.lost: tuple[type[BaseException], ...] = (
            exceptions.RayActorError,
            exceptions.NodeDiedError,
            exceptions.ObjectLostError,
            exceptions.OutOfMemoryError,
        )
        """What is raised where a worker is gone."""

    def connect(self, workers: int | None) -> Found:
        """Connect, or start a cluster of this machine with a core for each of ``workers``.

        Raises:
            EngineUnavailable: Nothing answers at the address, or something that is no such cluster.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            if self.address == LOCAL:
                self._start_local(workers or 1)
            else:
                self._check_answers()
                self._ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, SystemExit, self._error) as error:
            self.disconnect()
            words = why(error)
            message = (
                f"No Ray cluster can be used at {self.address!r} ({words}). Mend: start one with `ray start --head` "
                "and give its address, with Ray and Python in the same versions as here; or give --ray local."
            )
            raise EngineUnavailable(message) from error
        machines = sum(bool(node["Alive"]) for node in self._ray.nodes())
        return Found(machines=machines, gpus=int(self._ray.cluster_resources().get("GPU", 0)))

    def _start_local(self, cores: int) -> None:
        _sweep()
        parent = tempfile.gettempdir()  # the sockets in it have paths of at most 107 bytes
        self._folder = Path(
            tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent if len(parent) < 30 else "/tmp")
        )
        # Else Ray would write a token into the user's home. It reads one only once in a process, so this one stays.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        self._ray.init(
            address=LOCAL,
            num_cpus=cores,
            object_store_memory=_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(self._folder),
        )

    def _check_answers(self) -> None:
        """Ask once whether anything listens: Ray itself would wait for two minutes."""
        host, _, port = self.address.rpartition(":")
        if self.address != AUTO:
            socket.create_connection((host, int(port)), timeout=ANSWER_S).close()

    def put(self, value: object) -> Any:  # noqa: ANN401 - a reference of Ray's
        """Give every machine of the cluster access to a value, and return the reference to it."""
        return self._ray.put(value)

    def start(self, worker: type, *arguments: object, gpus: int) -> Any:  # noqa: ANN401 - an actor of Ray's
        """Have a worker started wherever there is room, on as many machines as possible."""
        kind = self._ray.remote(num_cpus=1, num_gpus=gpus, scheduling_strategy="SPREAD")(worker)
        return kind.remote(*arguments)

    def kill(self, actor: Any) -> None:  # noqa: ANN401 - an actor of Ray's
        """End a worker at once."""
        with contextlib.suppress(self._error):
            self._ray.kill(actor)

    def free(self) -> str:
        """Return what is free, in words."""
        found = self._ray.available_resources()
        return f"{found.get('CPU', 0):.0f} cores and {found.get('GPU', 0):.0f} GPUs"

    def disconnect(self) -> None:
        """Leave the cluster, with all workers that were started from here; end it if it was started here."""
        self._ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def why(error: BaseException) -> str:
    """Return the first sentences of one of Ray's errors, in one line."""
    return one_line(error, 300)


def _sweep() -> None:
    """Remove the folders of clusters whose run was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)
