"""Rows of mistakes on the command lines of all commands, whose hints are followed.

A row is a command's name and what is typed beside its `ALWAYS`; positional arguments are written as the keys that
refusals call them by, such as CHECKPOINT=PATH. `{run}` is a run of 8 steps, `{text}` a text, `{tokenizer}` one that has
its words, `{pairs}` pairs of texts, `{new}` a new folder of each command line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from platform import doctor, evaluate, generate, launch, tune
from platform.checkpoint.__main__ import main as checkpoint
from platform.data.__main__ import main as data
from platform.jobs.__main__ import main as jobs
from platform.plan.__main__ import main as plan
from platform.weights.__main__ import main as weights

Main = Callable[[Sequence[str]], int]
_TEXT = "data=text data.path={text} data.tokenizer={tokenizer} data.cache={new}/cache model.vocab=32 model.length=8"
_JOB = "+experiment=gpt_quick data=text data.path=/shared/corpus checkpoint.url=/shared/checkpoints"
ALWAYS: dict[str, tuple[Main, str]] = {
    "plan": (plan, "+experiment=gpt_quick"),
    "doctor": (doctor.main, "+experiment=gpt_quick cluster=inline run.dir={new}/run"),
    "slurm": (jobs, "slurm " + _JOB),
    "kubernetes": (jobs, f"kubernetes {_JOB} job.image=i job.claim=c"),
    "alone": (jobs, "slurm"),
    "supervise": (jobs, "supervise"),
    "status": (jobs, "status RUN_DIR={run}"),
    "logs": (jobs, "logs RUN_DIR={run}"),
    "prepare": (data, "prepare +experiment=gpt_quick " + _TEXT),
    "convert": (data, "convert megatron PREFIX={new}/bin +experiment=gpt_quick " + _TEXT),
    "export": (weights, "export URL={run}/checkpoints FOLDER={new}/hf"),
    "import": (weights, "import SOURCE={run} URL={new}/checkpoints"),
    "checkpoint": (checkpoint, "export URL={run}/checkpoints TARGET={new}/one.safetensors"),
    "evaluate": (evaluate.main, "CHECKPOINT={run}"),
    "write": (generate.main, "CHECKPOINT={run} PROMPT=the"),
    "tune": (tune.main, "MODEL={run} DATA={text} --plan cluster=inline data.tokenizer={tokenizer}"),
    "launch": (launch.main, "+experiment=gpt_quick"),
    "generate": (generate.main, "CHECKPOINT={run} --prompts={ids}"),
}
ROWS = """
plan train.stepz=5
plan tensor=auto
plan seed=-1
plan tensor=1d tensor.axes.t=3
plan tensor=1d tensor.axes.r=2
plan tensor=4d
plan pipeline=1f1b pipeline.stages=9
plan pipeline=file
plan parallel.zero=7
plan model.heads=5
plan model.kind=decoderr
plan model.positions=learnt
plan model.dropout=2
plan experiment=gpt_quik
plan train.freeze=[layer.0]
plan tune=lora tune.targets=[layer.0]
plan tune=lora train.freeze=[embedding]
plan tune=lora tune.targets=[embedding]
plan tune=lora tune.dropout=0.5 model.experts=2
plan tune.rank=8
plan tune=qlora model.d_model=36 model.heads=4
plan tune=qlora train.freeze=[embedding]
plan tune=qlora tune.double=true model.d_model=64
plan tune=lora tune.double=true
plan optimizer.betas=[1]
plan data.input_field=x
plan data.sources.a.path=x
plan optimizer.kind=adam
plan train.ramp_from=3
plan eval.patience=1 eval.every=0
doctor cluster=slurm
doctor cluster.doctor=slow
doctor elastic.spares=-1
doctor tensor=1d tensor.axes.t=3
doctor cluster.timeout=0
doctor checkpoint.url=nowhere://a
doctor run.dir=s3://a/b
doctor data.path={text}x data=text
slurm job.retries=many
slurm job.retries=-1
slurm job.retriez=1
slurm job.nodes=-1
slurm job.workers=x
slurm job.workers=5000
slurm job.time=soon
slurm job.time=0:00:10
slurm job.image=a.sqsh
slurm job.runtime=docker
slurm job.shared=perhaps
slurm job.request=gpu
slurm job.ip=5
slurm job.options=[qos]
slurm job.name=A
slurm data.path=
slurm checkpoint.url=
slurm data=stdlib data.path= checkpoint.url=
slurm parallel.data=-1
slurm tensor=1d tensor.axes.t=3
slurm wandb.api_key=abc
kubernetes job.image= job.claim=
kubernetes job.launcher=ray2
kubernetes job.launcher=torchrun job.wait=1:00:00
kubernetes job.launcher=torchrun elastic.spares=1
kubernetes job.launcher=torchrun elastic.max_workers=9
kubernetes job.launcher=torchrun job.workers=3 tensor=1d tensor.axes.t=2
kubernetes job.claim=A_
kubernetes job.mount=shared
kubernetes job.mount=/elsewhere
kubernetes job.storage=50
kubernetes job.storage=50Ti
kubernetes job.user=0
kubernetes job.select=[gpu]
kubernetes job.wait=long
kubernetes data.path=/home/corpus
supervise
status RUN_DIR={new}
logs RUN_DIR={new}
logs RUN_DIR={run} NAME=nothing
plan train.global_batch=0
plan optimizer.warmup_steps=100000000
prepare data.path={text}x
prepare data.pth={text}
prepare model.length=10000000
prepare model.vocab=4
prepare data.tokenizer=/nowhere
prepare data.kind=txt
prepare data.validation=2
prepare data.streaming=maybe
prepare data.objective=span
prepare data.packing=worst
prepare data.overlong=drop
prepare data=pairs data.path={text}
prepare data=mixture
prepare data=instructions data.path={text}
prepare data.field=words
prepare data.end_token=nothing
prepare data.chat_template=/nowhere
convert data.streaming=true data.validation=0 eval.every=0
convert data.path={text}x
convert model.length=10000000
export --shard=5TB
export --shard=0
export --family=llama
export --family=lama
export --like={text}
export --tokenizer=/nowhere
import SOURCE={new}
import SOURCE={text}
import --drop=nothing
checkpoint --only=embeding
checkpoint --only=x
checkpoint URL=nowhere://a
evaluate
evaluate --samples=-1
evaluate --beams=0
evaluate --shots=-1
evaluate --bleu
evaluate data=text
evaluate data=text data.path={text}
evaluate data=text data.path={text}x data.tokenizer={tokenizer}
evaluate data.pth={text}
evaluate eval.batches=0
evaluate tensor=1d tensor.axes.t=3
evaluate cluster=slurm
evaluate CHECKPOINT={new}
generate --tokens=0
generate --tokens=1000
generate --temperature=-1
generate --temperature=nan
generate --top-p=0
generate --top-p=2
generate --top-k=-1
generate --seed=-1
generate --seed=90071992547409930
generate --beams=0
generate --beams=90071992547409930
generate --beams=2 --temperature=1
generate --batch=0
generate --length-penalty=11
generate --length-penalty=nan
generate --out={text}
generate tensor=1d tensor.axes.q=2
generate tensor=1d tensor.axes.t=3
generate tensor.axes.t=0
generate precision=fp9
generate cluster=slurm
generate parallel.data=0
generate parallel.zero=7
generate model.heads=5
generate model.vocab=0
generate train.attention_kernel=flush
generate CHECKPOINT={run}/checkpointz
generate CHECKPOINT={run}s
generate data.tokenizer=/nowhere
generate pipeline=1f1b pipeline.stages=9
generate --config-dir=/nowhere
plan optimizer=sgd optimizer.nesterov=true optimizer.momentum=0
plan optimizer.schedule=wsd optimizer.decay_steps=1000000
plan optimizer.schedule=cosine_restarts optimizer.cycles=10000
plan optimizer.groups=[{lr:0.1}]
plan optimizer.groups=[{match:embedding,lr:-1}]
plan optimizer.groups=[{match:nothing,lr:0.1}]
plan optimizer=muon optimizer.matrices=nothing
plan optimizer=muon optimizer.matrices=.*bias tensor=3d tensor.axes.y=2 tensor.axes.z=2 tensor.vectors=diagonal
plan optimizer=muon optimizer.moments=int8
plan precision=fp32 optimizer.masters=split
plan precision=fp8 train.mlp_chunks=2
plan precision=mxfp8 quantise.powers=off
plan precision=fp8 tensor=1d tensor.axes.t=4
plan precision=fp32 optimizer.offload=states+masters
plan optimizer=muon optimizer.offload=states
plan optimizer=muon precision=bf16 optimizer.masters=split
plan optimizer.moments=int8 tensor=1d tensor.axes.t=4
plan train.ramp_samples=8
plan train.ramp_from=1000000
plan train.global_batch=8 train.ramp_from=2 train.ramp_by=4 train.ramp_samples=8
plan train.length_ramp=[0:64,9:128] model.kind=encoder_decoder
plan train.init_averaged=true
plan checkpoint.best=true eval.every=0
plan eval.prompts=[the] eval.every=0
plan eval.prompts=[the] model.kind=encoder
plan eval.tasks=[piqa] eval.every=0
plan eval.tasks=[piqa] model.kind=encoder
plan eval.task_samples=4
plan eval.least_gain=0.1
plan eval.averaged=true
plan model.within_documents=true
plan data=synthetic data.document_mask=true
plan model.kind=encoder_decoder data.packing=best_fit
plan model.kind=encoder_decoder data.objective=span_denoising model.length=2
plan data=instructions data.path={text} model.kind=encoder data.objective=masked
plan model.window=4 model.window_layers=[99]
plan cluster=ray cluster.runtime_env={pipp:x}
plan tensor=1d tensor.layout=3
plan tensor=1d tensor.axes.t=2 tensor.layout=heads:t;heads:t
plan tensor=1d tensor.axes.t=2 tensor.layout=heads:t+t
plan tensor=1d tensor.order=[t,t]
doctor data=mixture data.sources.a=3
doctor data=mixture data.sources.a.path={text} data.sources.a.weight=0
doctor data=mixture data.sources.a.path={text} data.sources.a.kind=mixture
doctor data=mixture data.sources.a.pth={text}
plan cluster.runtime_env=5
plan checkpoint.every=[often]
plan hydra/launcher=x
plan train.attention_kernel=flash model.dropout=0.1 model.fused_dropout=true
plan recompute=selective cluster.device=cuda
plan train.graphs=on cluster.device=cpu
plan tensor.async_products=on
plan train.pair_passes=on
doctor data=pairs data.path={pairs} data.streaming=true model.kind=encoder_decoder
doctor data=text data.path={text} data.streaming=true data.validation=0.1
doctor data.path={text}
doctor run.dir=/proc/x
plan --workers=2
plan experiment=paper/megatron_figure_15 +scale=small
plan tensor=layout tensor.layout=auto tensor.axes.rows=-1
slurm data.path=s3://user:password@host/x
alone data=stdlib
write
write data.tokenizer={tokenizer} --tokens=100
generate --beams=9007199254740992
evaluate data=text data.path={text} data.tokenizer={tokenizer} data.validation=0
convert data=pairs data.path={pairs} model.kind=encoder_decoder
convert data=synthetic data.path=
prepare model.vocab=12
prepare data.tokenizer=train model.vocab=3
tune --workers=0
tune --hardware=h100 cluster=processes
tune --hardware=h1000
tune MODEL=nobody/none
tune MODEL={text}
tune DATA={text}x
tune DATA={ids}
tune data.tokenizer=/nowhere
tune train.stpes=3
tune seed=-1
launch --cfg=job --package=trian
launch --bogus
launch +experiment=distill
"""
