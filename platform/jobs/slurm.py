"""Script of a run for Slurm: `sbatch FILE`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from platform.boundary.refusals import ConfigError
from platform.jobs.job_options import SlurmOptions, refuse_missing_options
from platform.jobs.planned_run import GIB, TEMPLATES, PlannedRun, fill_template, fold_words, plan_job, read_own_files
from platform.monitor.sinks.sink_process import secrets_of_sinks
from platform.plan.layout import format_count


def render_slurm_job(typed: Sequence[str], config_dir: str | None = None) -> str:
    """Write the script of the run that the arguments `typed` describe, with options `job.KEY=VALUE` among them
    (`SlurmOptions`). Raises ConfigError."""
    run = plan_job(SlurmOptions, typed, config_dir, lambda o: f"runs/{o.name}")
    if run.options.runtime:
        refuse_missing_options({"job.image": run.options.image})
    elif run.options.image:
        legal = ["job.runtime=pyxis", "job.runtime=apptainer"]
        raise ConfigError("job.image", run.options.image, "needs job.runtime", legal)
    return fill_template((TEMPLATES / "train.sbatch").read_text(), _template_values(run) | _own_values(run, config_dir))


def _own_values(run: PlannedRun, config_dir: str | None) -> dict[str, str | None]:
    """Return template place -> text for what writes the files of `config_dir` for a Slurm job, as they are now, and
    names them to the run. Modules of `extend` are found from the folder where the job is submitted."""
    if not config_dir:
        return {"own_files": None, "flags": ""}
    lines = []
    files = read_own_files(run, config_dir)
    for place, text in ((place, text) for place, text in files.items() if place.startswith("conf/")):
        folder, name, words = (shlex.quote(part) for part in (os.path.dirname(place), place, text))
        lines.append(f'mkdir -p "$shared"/{folder}\nprintf %s {words} >"$shared"/{name}')
    arguments = fold_words(run.arguments[2:], " \\\n")
    return {"own_files": "\n".join(lines), "flags": '--config-dir "$shared/conf" ', "arguments": arguments}


def _template_values(run: PlannedRun) -> dict[str, str | None]:
    """Return template place -> text for the sbatch script of a Slurm job, quoted as Slurm or bash reads it; None for a
    place that this job does not have."""
    o, size, gpu = run.options, run.size, run.size.device == "cuda"
    unit = "GPU" if gpu else "CPU worker"
    count = f"{o.gpu_type}:{size.workers}" if o.gpu_type else f"{size.workers}"
    typed = dict(word.partition("=")[::2] for word in run.arguments)  # as the job's own folder resolves them
    srun, prefix = _container_commands(run)
    interface = [shlex.quote(f"--interface={o.interface}")] if o.interface else []
    ip = [f"--ip={o.ip}"] if o.ip != 4 else []
    return {
        **{name: str(value) or None for name, value in vars(o).items()},
        "command": run.command,
        "what": f"{format_count(size.total_nodes, 'node')} of {format_count(size.workers, unit)}",
        "nodes": f"{size.total_nodes}",
        "gpus": (f"gpus-per-node={count}" if o.request == "gpus-per-node" else f"gres=gpu:{count}") if gpu else None,
        "cpus": f"{size.cpus}",
        "memory": f"{size.memory // GIB}G" if o.shared else "0",
        "needs": f"{size.memory // GIB}",
        "exclusive": None if o.shared else "exclusive",
        "margin": f"{size.margin + 60}",
        "saves": f"{size.margin - 30}",  # half a minute of it is for what Slurm and Ray do meanwhile
        "wanted": f"{size.nodes}",
        "options": "\n".join(f"#SBATCH {option}" for option in o.options) or None,
        "secrets": _render_secrets(run),
        "srun": " ".join(map(_quote_word, srun)),
        "prefix": " ".join([*map(_quote_word, prefix), "python"]),
        "run_dir": shlex.quote(typed["run.dir"]),
        "url": shlex.quote(typed.get("checkpoint.url", run.config.checkpoint.url).rstrip("/")),
        "node": " ".join([*interface, *ip, f"--drain={max(60, size.margin)}"]),
        "arguments": fold_words(run.arguments, " \\\n"),
    }


def _render_secrets(run: PlannedRun) -> str | None:
    """Return the lines of a Slurm job's script that read variables from files: the files of job.secrets, and the
    addresses and tokens of the services that its numbers go to, whose files may be missing; None without any."""
    typed = dict(pair.partition("=")[::2] for pair in run.options.secrets)
    files = [(variable, path, " must") for variable, path in typed.items()]
    of_services = secrets_of_sinks(run.config.monitor)
    files += [(name, f"~/.secrets/{service}/{key}", "") for name, service, key in of_services if name not in typed]
    lines = [f"secret {variable} {_quote_home_path(path)}{must}" for variable, path, must in files]
    block = fill_template((TEMPLATES / "secrets.sh").read_text(), {"files": "\n".join(lines)})
    return block.removesuffix("\n") if lines else None


def _quote_home_path(path: str) -> str:
    """Quote a path for bash, in which a leading ~ alone is the home directory."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def _quote_word(text: str) -> str:
    """Quote a word for bash, in which "$PWD" alone is a variable."""
    if "$PWD" not in text:
        return shlex.quote(text)
    return '"' + re.sub(r'([\\"`]|\$(?!PWD\b))', r"\\\1", text) + '"'


def _container_commands(run: PlannedRun) -> tuple[list[str], list[str]]:
    """Return the options of srun, and the command before Python's, by which every process runs in the job's container;
    both empty without one. Paths of the run are mounted; "$PWD", where the job was submitted, is too."""
    o, c = run.options, run.config
    if not o.runtime:
        return [], []
    paths = [path for path in (c.data.path, c.data.target_path, c.checkpoint.url) if path and "://" not in path]
    mounts = [*dict.fromkeys([*paths, *o.mounts])]
    if o.runtime == "pyxis":
        pairs = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)
        return [f"--container-image={o.image}", f"--container-mounts=$PWD:$PWD,{pairs}", "--container-workdir=$PWD"], []
    binds = [word for mount in mounts for word in ("--bind", mount)]
    nv = ["--nv"] if run.size.device == "cuda" else []
    return [], ["apptainer", "exec", *nv, "--pwd", "$PWD", "--bind", "$PWD", *binds, o.image]
