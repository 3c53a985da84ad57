"""All checks of an installation, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from headrace.cli.doctor import gpu_driver, installed, machine, native_libraries
from headrace.cli.doctor.diagnosis import Diagnosis, Say, examined


def examine_installation(say: Say) -> list[Diagnosis]:
    """Examine Python, packages, extras, native libraries and this machine. Libraries load in other processes meanwhile."""
    with ThreadPoolExecutor(2) as pool:
        loading = [pool.submit(native_libraries.loaded, names) for names in (native_libraries.TORCH, native_libraries.OTHERS)]
        found: list[Diagnosis] = []

        def check(name: str, examine: Callable[[], Iterable[Diagnosis]]) -> None:
            say(name)
            found.extend(examined(name, examine))

        check("Python", installed.interpreter)
        check("packages", lambda: installed.packages(installed.requirements()))
        check("extras", lambda: installed.extras(installed.requirements()))
        check("redis-server", native_libraries.redis_server)
        of_machine: list[tuple[str, Callable[[], Iterable[Diagnosis]]]] = [
            ("/dev/shm", machine.shared_memory),
            ("open files", machine.open_files),
            ("processors", machine.processors),
            ("memory", machine.memory),
            ("planner", machine.kernel_cache),
            ("clock", machine.clock),
        ]
        for name, examine in of_machine:
            check(name, examine)

        def facts() -> Mapping[str, native_libraries.Facts]:
            return {name: known for library in loading for name, known in library.result().items()}

        names = (*native_libraries.TORCH, *native_libraries.OTHERS)
        check("libraries", lambda: native_libraries.libraries(names, facts()))
        check("GPU", lambda: gpu_driver.gpu(facts().get("torch")))
    return found
