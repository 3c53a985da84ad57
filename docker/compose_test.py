"""Prove compose.yaml on a real engine: `make compose-test`.

`headrace demo` on this machine, to know how fast it is at present. Images, and how large they are. Up with two preprocessors
until the demo trainer ends, in at most three times as long; up again, which trains nothing; four preprocessors and a trainer
outside the containers; the same batches each time. Who lacks papers, or a token with the right role, is refused, by the web page
as well. Preprocessors come and go while a trainer takes their samples, by hand and by `headrace scale --compose`. The leader is
killed while data of one's own are trained, and Prometheus sees all services. Down, and nothing left.
Prints what passed, one line each; the exit code is 1 if anything did not.

Where no image registry is reached, stand-ins for the official images are built from Debian's packages. There is none of Grafana's
and the collector's, which are left out then; of the GPU's profile only the form is checked where no container gets a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from check_gpu import check_gpu
from check_protocol import CheckError, Protocol, expect
from check_scaling import check_scaling
from check_store import check_store
from engine import (
    BASE,
    BUILD_S,
    Compose,
    Image,
    UnavailableError,
    compose_command,
    debian_image,
    run,
    running_engine,
    wait_until,
)
from project_jobs import audited, own_job, steps_committed, summary, trained

from headrace.processes import free_port

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
WHEELS = ROOT / "docker" / "wheels"
HOST_S = 1800.0  # of `headrace demo`, which takes under half a minute on two free cores
MAX_RATIO = 3.0  # of the demo in containers over that on the host, from first to last process
PATIENCE = 10.0  # times as long as on the host, until it is given up
MOST_MB = {"reorder": 400, "preprocessor": 1200, "trainer": 1600}  # packed, as they are pulled
PAPERS = {
    "reorder": ["ca.crt", "store-password", "tls.crt", "tls.key", "tokens"],
    "preprocessor": ["ca.crt", "tls.crt", "tls.key", "token", "tokens"],
    "trainer": ["ca.crt", "tls.crt", "tls.key", "token"],
    "redis": ["ca.crt", "tls.crt", "tls.key", "users.acl"],
}
PROFILES = ("--profile", "ha", "--profile", "observability", "--profile", "gpu")
CONFINED = ("ReadonlyRootfs", "CapDrop", "SecurityOpt", "Memory", "PidsLimit")


def main() -> int:
    """Run all checks in order; the first that fails is the last."""
    protocol = Protocol()
    try:
        with running_engine() as whose, tempfile.TemporaryDirectory() as folder:
            print(f"engine {whose}; {' '.join(compose_command())}", flush=True)
            check_all(protocol, Path(folder))
    except UnavailableError as err:
        print(f"cannot test: {err}", file=sys.stderr)
        return 1
    except (CheckError, TimeoutError, subprocess.TimeoutExpired) as err:
        print(err, file=sys.stderr)
    except subprocess.CalledProcessError as err:
        print(f"{err}\n{err.stdout[-4000:]}\n{err.stderr[-4000:]}", file=sys.stderr)
    return min(protocol.failures, 1)


def check_all(protocol: Protocol, folder: Path) -> None:
    """Images, then the project up, scaled, compared, refused, cut off and down again."""
    with protocol.check("base images") as notes:
        base = BASE.obtain()
        redis = debian_image("redis:7-alpine", "redis", base).obtain()
        prometheus = debian_image("prom/prometheus:v3.5.0", "prometheus", base).obtain()
        notes += [base, redis, prometheus]
    with protocol.check("torch for the images") as notes:
        notes.append(fetch_cpu_torch())
    for name in ("HEADRACE_CLUSTER_TOKEN", "HEADRACE_CLUSTER_TOKEN_FILE", "HEADRACE_TLS", "HEADRACE_TOKENS"):
        os.environ.pop(name, None)  # the project makes its own
    endpoint, page = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    compose = Compose(
        command=compose_command(),
        project="headrace-compose-test",
        env={
            "HEADRACE_BASE_IMAGE": base,
            "HEADRACE_REDIS_IMAGE": redis,
            "HEADRACE_PROMETHEUS_IMAGE": prometheus,
            "HEADRACE_PROMETHEUS_PORT": str(free_port()),
            "HEADRACE_PUBLISH": endpoint,
            "HEADRACE_PUBLISH_PAGE": page,
            "HEADRACE_FORMAT": "json",
        },
    )
    compose(*PROFILES, "down", "--volumes", "--remove-orphans")  # of a test that was killed
    try:
        check_images(protocol, compose)
        limit_s = check_demo(protocol, compose, folder)
        check_doors(protocol, compose, endpoint, folder)
        check_store(protocol, compose)
        check_page(protocol, page, folder)
        check_outside(protocol, endpoint, folder, limit_s)
        check_scaling(protocol, compose, endpoint, folder, limit_s)
        check_gpu(protocol, compose, folder, limit_s)
        check_loss_of_leader(protocol, compose, folder, limit_s)
        check_observability(protocol, compose)
    except BaseException:
        print(compose(*PROFILES, "logs", "--no-color", "--tail=40"), file=sys.stderr)
        raise
    finally:
        with protocol.check("down, nothing left"):
            compose(*PROFILES, "down", "--volumes")
            expect("remains", compose.remains(), [])


def check_images(protocol: Protocol, compose: Compose) -> None:
    """They are built, and hold what their part needs and no more."""
    with protocol.check("images build"):
        compose("build", timeout_s=BUILD_S)
    for part, most_mb in MOST_MB.items():
        with protocol.check(f"image of {part}: at most {most_mb} MB to pull") as notes:
            image = f"headrace-{part}:latest"
            unpacked = int(run(["docker", "image", "inspect", "--format", "{{.Size}}", image])) / 1e6
            packed = int(run(["sh", "-c", f"docker save {image} | gzip -1 | wc -c"], timeout_s=BUILD_S)) / 1e6
            notes.append(f"{packed:.0f} MB packed, {unpacked:.0f} MB unpacked")
            expect(f"at most {most_mb} MB", packed <= most_mb, True)
    with protocol.check("no torch for reorder, no CUDA for preprocessor"):
        search = "import importlib.util; print(importlib.util.find_spec('torch'))"
        expect("torch of reorder", in_image("reorder", "python", "-c", search), "None")
        expect(
            "libraries of CUDA", in_image("preprocessor", "find", "/opt", "-name", "libcu*.so*", "-o", "-name", "libnccl*"), ""
        )


def check_demo(protocol: Protocol, compose: Compose, folder: Path) -> float:
    """The demo on the host and in containers; returns how many seconds to wait for other things of this kind."""
    with protocol.check("headrace demo on the host") as notes:
        command = [str(BIN / "headrace"), "demo", "--format", "json", "--out", str(folder / "demo")]
        start = time.monotonic()
        demo = json.loads(run(command, timeout_s=HOST_S))
        host_s = time.monotonic() - start
        protocol.ledgers["host"] = demo["ledger_sha256"]
        notes.append(summary(demo))
    limit_s = PATIENCE * host_s
    with protocol.check("up: the demo trainer ends with exit code 0") as notes:
        start = time.monotonic()
        compose("up", "--detach", timeout_s=limit_s)
        inside = trained(compose, limit_s)
        ratio = (time.monotonic() - start) / host_s
        protocol.ledgers["containers"] = inside["ledger_sha256"]
        notes += [summary(inside), f"{ratio:.1f} times as long as on the host"]
    with protocol.check(f"at most {MAX_RATIO:g} times as long as on the host"):
        expect(f"ratio {ratio:.2f} is at most {MAX_RATIO:g}", ratio <= MAX_RATIO, True)
    with protocol.check("stopped, up again: the store has kept the job, nothing is left to train"):
        compose("stop", timeout_s=limit_s)
        expect("exit code of `up --exit-code-from trainer`", compose_ends(compose, limit_s), 0)
        compose("up", "--detach", timeout_s=limit_s)
        trained(compose, limit_s)
        expect("its words", "was done before: nothing is left to train" in compose("logs", "trainer"), True)
    with protocol.check("confined: nothing to write to, no capability, limits"):
        for service in ("redis", "reorder", "preprocessor", "trainer"):
            for one in compose.containers(service):
                (container,) = json.loads(run(["docker", "inspect", one]))
                lacking = [name for name in CONFINED if not container["HostConfig"][name]]
                expect(f"what {service} is not confined by", lacking, [])
    with protocol.check("a container's quota is what its threads follow"):
        code = "from headrace.cli.run.processors import usable_processors; print(usable_processors())"
        expect("processors of --cpus 1", in_image("preprocessor", "python", "-c", code, options=["--cpus", "1"]), "1")
    with protocol.check("payload came through shared memory"):
        expect("transport=shared_memory in the trainer's log", "transport=shared_memory" in compose("logs", "trainer"), True)
    with protocol.check("two preprocessors, no process as root"):
        expect("preprocessors", len(compose.containers("preprocessor")), 2)
        for service in ("reorder", "preprocessor"):
            users = [run(["docker", "exec", one, "id", "-u"]).strip() for one in compose.containers(service)]
            expect(f"users of {service}", "0" in users, False)
    with protocol.check("--scale preprocessor=4 after training: four become healthy"):
        compose("up", "--detach", "--scale", "preprocessor=4", "redis", "reorder", "preprocessor")
        wait_until("4 healthy preprocessors", lambda: compose.healthy("preprocessor") == 4, timeout_s=limit_s)
    return limit_s


def check_doors(protocol: Protocol, compose: Compose, endpoint: str, folder: Path) -> None:
    """Every part has its own papers only, and who lacks the right ones is refused."""
    with protocol.check("each part sees its own papers only"):
        for service, wanted in PAPERS.items():
            compose.copy(service, "/run/headrace", folder / f"papers-of-{service}")  # by the engine: a trainer has ended
            found = sorted(path.name for path in (folder / f"papers-of-{service}").iterdir())
            expect(f"papers of {service}", found, wanted)
    compose.copy("papers", "/papers/client", folder / "client")
    compose.copy("papers", "/papers/trainer", folder / "trainer")
    listing = ["job", "list", "--endpoint", endpoint]
    client = ["--tls", str(folder / "client"), "--cluster-token-file", str(folder / "client" / "token")]
    with protocol.check("a client with papers and a token is served"):
        expect("the job that was trained", "demo" in run([str(BIN / "headrace"), *listing, *client]), True)
    with protocol.check("plain text is refused") as notes:
        notes.append(refused(listing, "speaks TLS only"))
        expect("its line in the log", 'reason="plain text"' in compose("logs", "reorder"), True)
    with protocol.check("a certificate of another authority is refused") as notes:
        run([str(BIN / "headrace"), "certs", str(folder / "foreign")])
        notes.append(refused([*listing, "--tls", str(folder / "foreign" / "client")], "certificate"))
        expect("a line in the log", "refused a connection" in compose("logs", "reorder"), True)
    with protocol.check("papers without a token are refused") as notes:
        notes.append(refused([*listing, "--tls", str(folder / "client")], "token"))
    with protocol.check("a preprocessor's token does not do what only a role of others may") as notes:
        compose.copy("preprocessor", "/run/headrace/token", folder / "preprocess-token")
        wrong = ["--tls", str(folder / "client"), "--cluster-token-file", str(folder / "preprocess-token")]
        notes.append(refused(["job", "cancel", "demo", "--endpoint", endpoint, *wrong], "preprocess"))
        expect("its line in the log", "refused" in compose("logs", "reorder"), True)


def check_page(protocol: Protocol, page: str, folder: Path) -> None:
    """The web page comes by HTTPS, and its figures for a token only that may see them."""
    trusted = ssl.create_default_context(cafile=str(folder / "client" / "ca.crt"))
    trusted.check_hostname = False  # the certificate is that of reorder.headrace

    def get(path: str, token: Path | None = None) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {token.read_text(encoding='utf-8').strip()}"} if token else {}
        try:
            asked = urllib.request.Request(f"https://{page}{path}", headers=headers)
            with urllib.request.urlopen(asked, timeout=30.0, context=trusted) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as err:
            with err:
                return err.code, err.read()

    own, wrong = folder / "client" / "token", folder / "preprocess-token"
    with protocol.check("the web page, by HTTPS") as notes:
        status, body = get("/")
        expect("status, and whether it is a page", (status, b"<html" in body), (200, True))
        statuses = [get("/api/jobs")[0], get("/api/jobs", wrong)[0], get("/api/jobs", own)[0]]
        expect("without a token, with a preprocessor's, with a client's", statuses, [401, 403, 200])
        jobs = json.loads(get("/api/jobs", own)[1])["jobs"]
        expect("jobs", [(job["job"], job["state"]) for job in jobs], [("demo", "done")])
        wait_until("4 preprocessors", lambda: len(json.loads(get("/api/service", own)[1])["preprocessors"]) == 4, timeout_s=60.0)
        notes.append(f"figures without a token, with one for preprocess, for submit: {statuses}; demo done, 4 preprocessors")


def check_outside(protocol: Protocol, endpoint: str, folder: Path, limit_s: float) -> None:
    """A trainer on the host, with the papers of the containers' trainer, has the same batches."""
    with protocol.check("a trainer outside the containers") as notes:
        papers = folder / "trainer"
        spec = own_job(folder / "job.yaml", "demo-from-outside", epochs=1)
        command = [str(BIN / "headrace"), "train", "--endpoint", endpoint, "--submit", str(spec), "--format", "json"]
        command += ["--tls", str(papers), "--cluster-token-file", str(papers / "token")]
        outside = json.loads(run(command, timeout_s=limit_s))
        protocol.ledgers["outside"] = outside["ledger_sha256"]
        notes.append(summary(outside))
    with protocol.check("the same ledger everywhere"):
        expect("ledgers", len(set(protocol.ledgers.values())), 1)


def check_loss_of_leader(protocol: Protocol, compose: Compose, folder: Path, limit_s: float) -> None:
    """Profile ha: data and job of one's own are trained while the leading reorder service is killed; the ledger is whole."""
    data = folder / "data"
    shutil.copytree(ROOT / "examples" / "data", data)
    data.chmod(0o755)
    job = own_job(folder / "own.yaml", "own", epochs=3)
    folder.chmod(0o755)  # the containers' user is another one
    own = {"HEADRACE_DATA": str(data), "HEADRACE_JOB": str(job), "HEADRACE_REORDER": "reorder:7070,standby:7070"}
    beside = Compose(command=compose.command, project=compose.project, env={**compose.env, **own})
    with protocol.check("profile ha: a second reorder service stands by, own data") as notes:
        beside("--profile", "ha", "up", "--detach", "--force-recreate", "--no-deps", "standby", "preprocessor", timeout_s=limit_s)
        wait_until("the standby to be healthy", lambda: beside.healthy("standby") == 1, timeout_s=limit_s)
        notes.append(f"HEADRACE_DATA={data.name} HEADRACE_JOB={job.name}")
    with protocol.check("the leader is killed in mid-run, training goes on") as notes:
        beside("up", "--detach", "--force-recreate", "--no-deps", "trainer", timeout_s=limit_s)
        wait_until("a committed step", lambda: steps_committed(beside, "own") > 0, timeout_s=limit_s)
        at = steps_committed(beside, "own")
        run(["docker", "kill", *beside.containers("reorder")])
        report = trained(beside, limit_s)
        notes += [summary(report), f"killed at about step {at}"]
        expect(f"some steps before the loss ({at}) and some after", 0 < at < report["steps"], True)
    with protocol.check("the ledger has every sample of every epoch once") as notes:
        notes.append(audited(beside, "own", "standby"))


def check_observability(protocol: Protocol, compose: Compose) -> None:
    """Profile observability: Prometheus finds all services; Grafana and the collector run where their images are to be had."""
    with protocol.check("profile observability: Prometheus sees every service") as notes:
        compose("--profile", "observability", "up", "--detach", "--no-deps", "reorder", "prometheus")
        address = f"http://127.0.0.1:{compose.env['HEADRACE_PROMETHEUS_PORT']}/api/v1/query?query="

        def ask(query: str) -> dict[str, float]:
            try:
                with urllib.request.urlopen(address + urllib.parse.quote(query), timeout=5.0) as answer:
                    found = json.load(answer)["data"]["result"]
            except (OSError, ValueError):
                return {}
            return {one["metric"].get("service", ""): float(one["value"][1]) for one in found}

        wanted = {"reorder": 1.0, "standby": 1.0, "preprocessor": float(compose.healthy("preprocessor"))}
        wait_until(f"targets {wanted}", lambda: ask("sum by (service) (up)") == wanted, timeout_s=120.0)
        expect("leaders", ask("sum(headrace_reorder_leaders)"), {"": 1.0})
        samples = ask("sum(headrace_preprocessor_samples_decoded_total)")[""]
        notes.append(f"{samples:.0f} samples decoded, one leader")
    for service, name in (("grafana", "grafana/grafana:12.1.0"), ("collector", "otel/opentelemetry-collector:0.135.0")):
        if not Image(name=name, stand_in="", build=("false",)).is_here():
            print(f"left out {service}: {name} is not to be had here; its files are checked by the tests only", flush=True)
            continue
        with protocol.check(f"profile observability: {service} runs"):
            compose("--profile", "observability", "up", "--detach", "--no-deps", service)
            time.sleep(5.0)  # what ends at once for its files has ended by then
            (state,) = json.loads(run(["docker", "inspect", *compose.containers(service)]))
            expect("restarts", (state["State"]["Running"], state["RestartCount"]), (True, 0))


def compose_ends(compose: Compose, limit_s: float) -> int:
    """The exit code of `docker compose up` as the page has it, which ends with the trainer and stops all others."""
    try:
        compose("up", "--exit-code-from", "trainer", timeout_s=limit_s)
    except subprocess.CalledProcessError as err:
        return err.returncode
    return 0


def in_image(part: str, program: str, *arguments: str, options: Sequence[str] = ()) -> str:
    """What a program of a part's image prints."""
    return run(["docker", "run", "--rm", *options, "--entrypoint", program, f"headrace-{part}:latest", *arguments]).strip()


def refused(arguments: Sequence[str], why: str) -> str:
    """The sentence with which this machine's `headrace` is refused. Raises CheckError if it is served, or does not hear `why`."""
    ended = subprocess.run([str(BIN / "headrace"), *arguments], text=True, capture_output=True, timeout=60.0)
    said = ended.stderr.strip().splitlines()
    expect("exit code of a refused command", ended.returncode != 0, True)
    expect(f"{why!r} in {said[-1:]}", bool(said) and why in said[-1], True)
    return said[-1]


def fetch_cpu_torch() -> str:
    """Put torch's CPU wheel into docker/wheels where pip finds one here; says what the image gets."""
    if any(WHEELS.glob("torch-*+cpu-*.whl")):
        return "CPU wheel is here"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (pin,) = (needed for needed in project["optional-dependencies"]["trainer"] if needed.startswith("torch>="))
    pip = [sys.executable, "-m", "pip", "--quiet"]
    report = json.loads(
        run([*pip, "install", "--dry-run", "--ignore-installed", "--no-deps", "--report=-", pin], timeout_s=BUILD_S)
    )
    version = report["install"][0]["metadata"]["version"]
    if not version.endswith("+cpu"):
        return f"{version}: no CPU wheel here, the image takes the index's build"
    run([*pip, "download", "--no-deps", f"--dest={WHEELS}", f"torch=={version}"], timeout_s=BUILD_S)
    return f"{version} into docker/wheels"


if __name__ == "__main__":
    sys.exit(main())
