"""Command lines that are refused, and how: the table of tests/config/test_bad_input.py."""

# key | the least | the most. One below and one above are refused, with the bound as the nearest legal.
NUMBERS = """
seed 0 9223372036854775807
recompute_every 1 10000
train.steps 1 1000000000000
train.stop_at 0 1000000000000
train.global_batch 1 100000000
train.microbatch 1 1000000
train.mlp_chunks 1 1000000
quantise.block 1 100000
model.layers 1 1000
model.d_model 1 1048576
model.heads 1 65536
model.kv_heads 0 65536
model.d_kv 0 65536
model.d_ff 0 16777216
model.length 1 16777216
model.source_length 0 16777216
model.vocab 1 16777216
model.io 1 16777216
model.hidden 1 16777216
model.buckets 4 65536
model.distance 1 1000000000000
optimizer.warmup_steps 0 1000000000000
parallel.data -1 1000000
parallel.zero_group 0 1000000
parallel.experts 1 1000000
parallel.context 1 1000000
parallel.context_heads 0 1000000
parallel.context_pieces 0 1024
model.experts 0 65536
model.experts_per_token 1 65536
model.expert_d_ff 0 16777216
model.kv_latent 0 65536
model.q_latent 0 65536
model.d_rope 0 65536
model.d_value 0 65536
model.shared_experts 0 1000
model.predict_ahead 0 16
model.router_groups 1 65536
model.router_groups_kept 1 65536
model.router_group_best 1 65536
tensor.axes.t 1 1000000
branch.axes.g 1 1000000
pipeline.stages 1 1000
pipeline.chunks 1 1000
checkpoint.keep 1 1000000000000
checkpoint.keep_every 0 1000000000000
eval.every 0 1000000000000
eval.batches 1 1000000
elastic.min_workers 0 1000000
elastic.max_workers 0 1000000
elastic.spares 0 1000000
elastic.attempts 1 1000000
elastic.snapshot_every 0 1000000000000
cluster.threads 0 4096
monitor.every 1 1000000000000
monitor.sample 0 1000000
"""

# key | a value below, as it is shown | the nearest legal | a value above | the nearest legal
REALS = """
optimizer.lr -1.0 0 1e+308 1000000.0
optimizer.eps 0.0 - 1e+300 1000000.0
optimizer.weight_decay -0.5 0 1e+308 1000000.0
optimizer.clip -1e-09 0 1e+300 1000000000000
optimizer.min_lr -0.1 0 1.5 1
model.dropout -0.1 0 1.0 -
model.label_smoothing -0.1 0 1.0 -
model.rope_theta 0.0 - 1e+300 1000000000000
data.validation -0.1 0 1.0 -
train.spike -1.0 0 1e+300 1000000000000
run.time_margin -1.0 0 1e+300 100000000
elastic.wait -1.0 0 1e+300 100000000
elastic.hang_seconds 0.0 - 1e+300 100000000
cluster.network 0.0 - 1e+300 1000000000000
elastic.mean_hours_between_failures -1.0 0 1e+300 1000000
elastic.slow -1.0 0 1e+300 1000000000000
cluster.wait -1.0 0 1e+300 100000000
monitor.goodput_below -0.1 0 1.5 1
"""

# what is typed | how a line begins | what is in it further on
TABLE = r"""
train.stepz=5 | train.stepz=5: unknown key | train.steps
modle.layers=5 | modle.layers=5: unknown key | model.layers
Seed=5 | Seed=5: unknown key | seed
hardware=h100 | hardware=h100: no key of a run: --hardware h100 | cluster.hardware=h100
optimzer.lr=5 | optimzer.lr=5: unknown key | optimizer.lr
tensor.axis.t=2 | tensor.axis.t=2: unknown key | tensor.axes.t
precision=fp9 | precision=fp9: unknown | fp8
recompute=all | recompute=all: unknown | full
train.graphs=always | train.graphs=always: unknown | auto
recompute.offload=true | recompute.offload=true: unknown key | recompute_offload
train.steps.a=1 | train.steps.a=1: unknown key | train.steps
recompute_offload=true | recompute_offload=true: recompute=none keeps more than the inputs of blocks | false
model.norm=batch | model.norm=batch: unknown | layernorm
model.activation=gulu | model.activation=gulu: unknown | gelu
model.positions=learnt | model.positions=learnt: unknown | learned
model.kind=decodr | model.kind=decodr: unknown | decoder
data.kind=txt | data.kind=txt: unknown | stdlib
data.objective=casual | data.objective=casual: unknown | causal
optimizer.kind=adam | optimizer.kind=adam: unknown | adamw
optimizer.schedule=cosin | optimizer.schedule=cosin: unknown | cosine
parallel.zero=4 | parallel.zero=4: unknown | 3, 2, 1
branch.order=middle | branch.order=middle: unknown | inner
branch.slice_via=gather | branch.slice_via=gather: unknown | all_to_all
pipeline.kind=1f1c | pipeline.kind=1f1c: unknown | 1f1b
train.on_spike=ignore | train.on_spike=ignore: unknown | rollback
tensor.gathered=never | tensor.gathered=never: unknown | keep
cluster.kind=rey | cluster.kind=rey: unknown | ray
cluster.device=gpu | cluster.device=gpu: unknown | cuda
monitor.kind=tensorboard | monitor.kind=tensorboard: unknown | console
model=gpt_tinny | model=gpt_tinny: unknown | gpt_tiny
tensor=4d | tensor=4d: unknown | 3d
branch=dps | branch=dps: unknown | dsp
pipeline=gpip | pipeline=gpip: unknown | gpipe
data=stdlb | data=stdlb: unknown | stdlib
optimizer=adamv | optimizer=adamv: unknown | adamw
cluster=slurm | cluster=slurm: unknown | local
monitor=wanbd | monitor=wanbd: unknown | wandb
experiment=gpt_quik | experiment=gpt_quik: unknown | gpt_quick
experiment=[gpt_quick,moe_quik] | experiment=moe_quik: unknown | moe_quick
experiment=3 | experiment=3: must be a name
experiment={a:1} | experiment={a:1}: 
experiment=[gpt_quick,[a]] | experiment=[gpt_quick,[a]]: must be a name
model.layers=??? | model.layers=???: must be given | 2
model=null | model=null: must be a name
train=5 | train=5: 
train=null | train=null: must be given
plan.search=[tensr] | plan.search=tensr: no key that the planner chooses | tensor
plan.search=[tensor.axis] | plan.search=tensor.axis: no key that the planner chooses | tensor.axes
elastic.faults=null | elastic.faults=null: must be given
tensor.axes={t:null} | tensor.axes={t:null}: 
tensor.axes={t:a} | tensor.axes={t:a}: 
tensor.axes=[1] | tensor.axes=[1]: 
elastic.faults=[[5:kill:1]] | elastic.faults=[[5:kill:1]]: | must be a list, each of it text
elastic.faults=[{a:1}] | elastic.faults=[{a:1}]: 
elastic.faults=5:kill:1 | elastic.faults=5:kill:1: 
resume.allow=[[a]] | resume.allow=[[a]]: 
extend=[[a]] | extend=[[a]]: 
extend=[1] | extend=1: must be the name of a module
extend=["a b"] | extend=a b: must be the name of a module
extend=[no_such_module_here] | extend=no_such_module_here: cannot be imported
extend=["../evil"] | extend=../evil: must be the name of a module
optimizer.betas=[a,b] | optimizer.betas=[a,b]: 
optimizer.betas=[nan,0.9] | optimizer.betas.0=nan: must be >= 0
optimizer.betas=[0.9,inf] | optimizer.betas.1=inf: must be >= 0
optimizer.betas=[] | optimizer.betas=[]: must be two numbers | [0.9, 0.95]
seed=nan | seed=nan: must be an integer | 0
seed=inf | seed=inf: must be an integer | 0
seed=1e400 | seed=1e400: must be an integer | 0
seed=1.0 | seed=1.0: must be an integer | 1
seed=true | seed=true: must be an integer
seed='' | seed='': must be an integer | 0
seed= | seed=: must be an integer | 0
seed=[1] | seed=[1]: must be an integer | 0
seed={a:1} | seed={a:1}: must be an integer | 0
seed=0x10 | seed=0x10: must be an integer
seed=٣x | seed=٣x: must be an integer
seed=🐍 | seed=🐍: must be an integer | 0
seed=1,2 | seed=1,2: several values
seed=range(3) | seed=range(3): several values
seed=${nope} | seed=${nope}: 
seed=${seed} | seed=${seed}: 
seed=${oc.env:NO_SUCH_VARIABLE} | seed=${oc.env:NO_SUCH_VARIABLE}: 
seed=${oc.nope:1} | seed=${oc.nope:1}: 
seed | seed: must be KEY=VALUE | train.steps
~seed=5 | ~seed=5: must be KEY=VALUE
=5 | =5: must be KEY=VALUE
seed@x=5 | seed@x=5: 
model@x=gpt_tiny | model@x=gpt_tiny: 
hydra.run.dir=x | hydra.run.dir=x: Hydra's own keys do nothing here | --config-dir
hydra.searchpath=[/] | hydra.searchpath=[/]: Hydra's own keys do nothing here | --config-dir
hydra/launcher=joblib | hydra/launcher=joblib: only Hydra's basic launcher is there: the jobs of a sweep run one after
hydra/launcher=submitit_slurm | hydra/launcher=submitit_slurm: only Hydra's basic launcher is there
hydra/sweeper=optuna | hydra/sweeper=optuna: only Hydra's basic sweeper is there
hydra.sweeper.n_trials=20 | hydra.sweeper.n_trials=20: only Hydra's basic sweeper is there
hydra.launcher.n_jobs=4 | hydra.launcher.n_jobs=4: only Hydra's basic launcher is there
model.heads=5 | model.heads=5: must divide model.d_model=128 | 4, 
model.heads=3 model.d_model=1000003 | model.heads=3: must divide model.d_model=1000003 | 1, 1000003
model.kv_heads=3 | model.kv_heads=3: must divide model.heads=4 | 2, 4, 1
model.experts=4 model.experts_per_token=5 | model.experts_per_token=5: must be <= model.experts=4 | 4
model.experts=4 model.experts_every=9 | model.experts_every=9: must be <= model.layers=4, so that a layer | 4
model.shared_experts=1 | model.shared_experts=1: model.experts=0: the model has no experts | 0
model.expert_d_ff=8 | model.expert_d_ff=8: model.experts=0: the model has no experts | 0
model.query_key_norm_over=heads | model.query_key_norm_over=heads: model.query_key_norm=false is no norm | head
data.end_token=X | data.end_token=X: says something of a tokenizer that data.tokenizer names | data.tokenizer=PATH
model.experts_every=2 | model.experts_every=2: model.experts=0: the model has no experts | 1
model.router_jitter=0.1 | model.router_jitter=0.1: model.experts=0: the model has no experts | 0
model.router_bias=true | model.router_bias=true: model.experts=0: the model has no experts | false
model.balance_over=microbatch | model.balance_over=microbatch: unknown | batch
parallel.lent_experts=1 | parallel.lent_experts=1: parallel.experts=1: every replica has all | 0
model.experts=4 parallel.experts=4 parallel.lent_experts=1 | parallel.lent_experts=1: model.capacity_factor=1. | 0
model.experts=4 model.capacity_factor=0 parallel.experts=4 parallel.lent_experts=4 | parallel.lent_experts=4: must | 3
model.dense_layers=[0] | model.dense_layers=[0]: model.experts=0: the model has no experts | []
model.experts=4 model.dense_layers=[1,4] | model.dense_layers=4: layers are 0 to 3 | 3
model.experts=4 model.experts_every=2 model.dense_layers=[1,3] | model.dense_layers=[1, 3]: leaves no layer with | [1]
model.rope_share=0.5 | model.rope_share=0.5: model.positions=learned has no rotations | 1
model.rope_share=0.5 model.positions=rope model.d_kv=6 | model.rope_share=0.5: rotates 3 of 6 elements: needs | 0.66
model.positions=rope model.rope_short=[1] | model.rope_short=[1.0]: has 1 numbers; model.rope_scaling=none has one | []
model.kv_latent=8 model.rope_share=0.5 | model.rope_share=0.5: model.kv_latent=8 rotates model.d_rope elements | 1
model.predict_ahead=1 model.kind=encoder | model.predict_ahead=1: model.kind=encoder has no such modules | 0
tune=lora tune.double=true | tune.double=true: tune=lora has no scales | false, tune=qlora
model.predict_ahead=4 model.length=4 | model.predict_ahead=4: must be < model.length=4, tokens further on | 3
model.linear_layers=[9] | model.linear_layers=9: layers are 0 to 3 | 3
model.linear_layers=[1] model.linear_value_heads=6 model.linear_key_heads=4 | model.linear_value_heads=6: must be a | 8
model.linear_layers=[1] model.kind=encoder | model.linear_layers=[1]: model.kind=encoder: a rule reads the past | []
model.shared_expert_gate=true | model.shared_expert_gate=true: there are no shared experts | false
model.kv_latent=8 model.attention_gate=true | model.attention_gate=true: model.kv_latent=8 has no gate | false
model.no_rope_layers=[1] | model.no_rope_layers=[1]: model.positions=learned has no rotations | []
model.positions=rope model.no_rope_layers=[1,9] | model.no_rope_layers=9: layers are 0 to 3 | 3
model.positions=rope model.window_rope_theta=50 | model.window_rope_theta=50.0: model.window=0 is no window | 0
model.shared_d_ff=8 model.experts=4 | model.shared_d_ff=8: there are no shared experts | 0
model.expert_factors=true | model.expert_factors=true: model.experts=0: the model has no experts | false
model.experts=4 model.expert_norms=true | model.expert_norms=true: model.shared_experts=0: nothing else reads | false
model.global_d_kv=8 | model.global_d_kv=8: model.window=0: all layers are alike | 0
model.global_kv_heads=3 model.window=4 | model.global_kv_heads=3: must divide model.heads=4 | 2, 4
model.kv_latent=8 model.value_norm=true | model.value_norm=true: model.kv_latent=8 makes keys and values | false
model.values_are_keys=true model.kind=encoder_decoder | model.values_are_keys=true: model.kind=encoder_decoder | false
model.positions=rope model.window=4 model.global_d_kv=7 | model.global_d_kv=7: model.positions=rope rotates | 6, 8
model.post_norm=true model.parallel_residual=true | model.parallel_residual=true: model.post_norm=true has one | false
model.parallel_residual=true model=t5_tiny | model.parallel_residual=true: model.kind=encoder_decoder reads its | false
model.d_rope=4 | model.d_rope=4: model.kv_latent=0 is no latent attention | 0
model.d_value=4 model.q_latent=8 | model.q_latent=8: model.kv_latent=0 is no latent attention | 0
model.post_norm=true model.input_norm=false | model.input_norm=false: model.post_norm=true has one norm a | true
model.post_norm=true model.output_norm=true | model.output_norm=true: model.post_norm=true has one norm a layer | false
model.kv_latent=8 | model.positions=learned: model.kv_latent=8 rotates a part of queries and keys | rope
model.kv_latent=8 | model.attention_bias=all: model.kv_latent=8 has no biases | none
model.kv_latent=8 model.d_rope=7 | model.d_rope=7: must be even, > 0 and < 32, the width of a head | 6, 8, 4
model.kv_latent=8 model.d_kv=12 model.d_rope=12 | model.d_rope=12: must be even, > 0 and < 12, the width | 10, 8, 6
model.kv_latent=8 model.kv_heads=2 | model.kv_heads=2: model.kv_latent=8 makes keys and values of every head | 0, 4
model.kv_latent=8 model.query_key_norm=true | model.query_key_norm=true: model.kv_latent=8 has norms of | false
model.kv_latent=8 model=t5_tiny | model.kv_latent=8: model.kind=encoder_decoder has no latent attention | 0
model.rope_pairs=neighbours | model.rope_pairs=neighbours: model.positions=learned has no rotations | halves
model.router_groups=2 | model.router_groups=2: model.experts=0: the model has no experts | 1
model.experts=8 model.router_groups=3 | model.router_groups=3: must divide model.experts=8 | 2, 4
model.experts=8 model.router_groups_kept=3 | model.router_groups_kept=3: must be <= model.router_groups=1 | 1
model.experts=8 model.experts_per_token=3 model.router_groups=4 | model.router_groups_kept=1: has 2 experts, | 2
model.experts=8 model.router_groups=4 model.router_group_best=3 | model.router_group_best=3: must be <= 2 | 2
parallel.context=3 | model.length=128 is not divisible by parallel.context=3 | parallel.context=2 or 4
parallel.context=8 parallel.context_kind=heads | model.heads=4 is not divisible by tensor.axes.t=2 x | context=2
parallel.context_heads=2 | parallel.context_heads=2: only for context_kind=nested, not auto | 0
parallel.context=8 parallel.context_kind=nested | parallel.context_heads=0: must divide parallel.context=8 | 2
parallel.context_pieces=3 | parallel.context_pieces=3: must be even: a rank gets two pieces in each round | 2, 4
parallel.context=2 parallel.context_pieces=6 | parallel.context_pieces=6: x parallel.context=2, 12 | 4, 8, 2
parallel.context=2 parallel.context_pieces=4 train.length_ramp=[0:4,4:128] | parallel.context_pieces=4: x | ramp=4
parallel.context_pieces=4 parallel.context_balance=false | parallel.context_pieces=4: only for | balance=true
parallel.context=2 parallel.context_kind=nested parallel.context_heads=2 | parallel.context_heads=2: must divide | auto
parallel.experts=2 | parallel.experts=2: model.experts=0: the model has no experts | 1
parallel.tensor_experts=whole | parallel.tensor_experts=whole: model.experts=0: the model has no experts | split
parallel.tensor_experts=halved model.experts=4 | parallel.tensor_experts=halved: unknown | split
model.experts=3 parallel.tensor_experts=whole | parallel.tensor_experts=whole: t=2 must divide model.experts=3 | split
model.experts=4 parallel.tensor_experts=whole parallel.experts=4 parallel.data=4 | parallel.experts=4: must | 2
model.experts=4 parallel.tensor_experts=whole parallel.lent_experts=1 | parallel.lent_experts=1: parallel.experts=1: | 0
model.experts=6 parallel.experts=4 parallel.data=4 | parallel.experts=4: must divide model.experts=6 | 2, 1
model.experts=4 parallel.data=4 parallel.experts=3 tensor.uneven=true | parallel.experts=3: must divide | 2, 4
model.experts=8 parallel.experts=4 parallel.data=2 | parallel.experts=4: must divide parallel.data=2 | 2, 1
model.experts=8 parallel.experts=8 parallel.data=8 parallel.zero=1 parallel.zero_group=2 | parallel.zero_group=2: | 8, 0
model.positions=rope model.d_kv=17 | model.d_kv=17: | 16, 18
model.positions=rope model.heads=128 | model.heads=128: | 64, 32, 16
model.positions=relative model.distance=8 | model.distance=8: must be more than half | 17
model.source_length=8 | model.source_length=8: | 0
model.kind=encoder | monitor.sample=64: model.kind=encoder generates no text | 0
data.objective=masked | data.objective=masked: | causal
data=pairs | data.objective=pairs: 
train.stop_at=301 | train.stop_at=301: must be <= train.steps=300 | 300
optimizer.warmup_steps=400 | optimizer.warmup_steps=400: must be <= train.steps=300 | 300
eval.every=5 data.validation=0 | data.validation=0: eval.every=5 needs a held-out split | 0.05
data=text | data.path=: data=text needs a file | FILE
pipeline.stages=4 | pipeline.stages=4: pipeline=none has one | 1
pipeline.chunks=2 | pipeline.chunks=2: pipeline=none has one | 1
pipeline=gpipe pipeline.chunks=2 | pipeline.chunks=2: pipeline=gpipe has one chunk | interleaved
pipeline=1f1b pipeline.chunks=1000 | pipeline.chunks=1000: pipeline=1f1b has one chunk | 1
pipeline=file | pipeline.file=: 
pipeline.file=/a.csv | pipeline.file=/a.csv: only for pipeline=file | pipeline=file, ''
branch.axes.g=2 | branch.axes.g=2: branch=none has no axes | 1, branch=NAME
branch=dsp branch.axes.t=2 | branch.axes.t=2: tensor=1d has an axis t
branch=dsp branch.axes.data=2 | branch.axes.data=2: the names stage, data, zero, expert, context, exchange are
tensor.axes.q=2 | tensor.axes.q=2: tensor=1d has no such axis | tensor.axes.t=2, 1
tensor=serial tensor.axes.t=2 | tensor.axes.t=2: tensor=serial has no such axis | 1
tensor=3d tensor.axes.t=2 | tensor.axes.t=2: tensor=3d has no such axis | tensor.axes.x=2, 
tensor=layout tensor.axes.stage=2 | tensor.axes.stage=2: the names stage, data, zero, expert, context, exchange are
tensor=layout tensor.axes={a-b:2} | tensor.axes.a-b=2: an axis is named by letters
tensor.layout=batch:t | tensor.layout=batch:t: only for tensor=layout
tensor=layout tensor.axes.a=2 tensor.layout=batch:b | tensor.layout=batch:b: no such axis | a
tensor=layout tensor.axes.a=2 tensor.layout=hedas:a | tensor.layout=hedas: no such dim | heads
tensor=layout tensor.axes.a=2 tensor.layout={mpl:{d_ff:a}} | tensor.layout=mpl: no such region | mlp
tensor=layout tensor.axes.a=2 tensor.layout={batch: 3} | tensor.layout=batch:3: must be the name of an axis
tensor=layout tensor.axes.a=2 tensor.layout={batch:[[a]]} | tensor.layout=batch:
tensor=layout tensor.axes.a=2 tensor.layout=5 | tensor.layout=5: must be dim:axis
tensor=layout tensor.axes.a=2 tensor.layout={batch:[a | tensor.layout={batch:[a: not YAML
tensor.order=[a] | tensor.order=[a]: lacks t, an axis of tensor.regions.attention.heads | [t]
tensor.regions.mlp.d_ff=[q] | tensor.order=[t]: lacks q, an axis of tensor.regions.mlp.d_ff | d_ff=[t], [t,q]
tensor.vectors=diag | tensor.vectors=diag: unknown | even
tensor.vectors=diagonal | tensor.vectors=diagonal: tensor=1d has no plane of axes y and z | even, tensor=3d
tensor=3d tensor.axes.y=2 tensor.axes.z=4 tensor.vectors=diagonal | tensor.vectors=diagonal: the plane of | y=4 tensor
tensor=3d tensor.vectors=diagonal parallel.data=2 parallel.zero=1 | parallel.zero=1: not built yet beside tensor.vec | 0
tensor=3d tensor.order=[z,x] | tensor.order=[z,x]: lacks y | [z,x,y]
train.loss=huber | train.loss=huber: unknown | '', cross_entropy
train.teacher=runs/large | train.teacher= | train.loss=cross_entropy asks no teacher; nearest legal: train.loss=distill
train.loss=distill data=synthetic | data.kind=synthetic: has no samples with a place in teacher.bin | stdlib
train.loss=distill train.loss_settings.top=99999 | train.loss_settings.top=99999: must be <= model.vocab= | , 0
train.loss=distill train.loss_settings.weight=0 | train.loss_settings.weight=0.0: must be > 0 and <= 1
train.loss=distill train.loss_settings.temperature=0 | train.loss_settings.temperature=0.0: must be > 0
train.loss=distill train.loss_settings.direction=both | train.loss_settings.direction=both: unknown | forward
train.loss=distill model.kind=encoder | train.loss=distill: data.objective=masked of model.kind=encoder | cross_entropy
train.loss=distill data=preferences data.path=README.md | train.loss=distill: data.objective=preference | dpo
train.loss=dpo | train.loss=dpo: data.objective=causal does not go with it | '', cross_entropy
data=preferences data.path=README.md data.packing=cut | data.packing=cut: data=preferences keeps | best_fit
data=preferences data.path=README.md data.overlong=split | data.overlong=split: data=preferences keeps | drop
data=preferences data.path=README.md train.loss=cross_entropy | train.loss=cross_entropy: data.objective=pref | dpo
data=preferences data.path=README.md data.streaming=true | data.streaming=true: data=preferences is scored | false
precision=fp8 quantise.gather=on | quantise.gather=on: weights keep their numbers under parallel.zero=3 | auto
data.objective=preference | data.objective=preference: model.kind=decoder and data=stdlib | causal
tensor.axes.t=3 | model.heads=4 is not divisible by tensor.axes.t=3 | tensor.axes.t=2 or 4
tensor.axes.t=999983 parallel.data=1 | model.heads=4 is not divisible | tensor.axes.t=4
tensor.axes.t=720720 parallel.data=1 | model.heads=4 is not divisible | tensor.axes.t=4
tensor.axes.t=1000 parallel.data=1001 | parallel.data=1001: | 1000
parallel.data=1000000 | parallel.data=1000000: | 500000
parallel.data=0 | parallel.data=0: must be >= 1 | 1, -1
train.global_batch=100000000 train.microbatch=1 | train.global_batch=100000000: is 50000000 microbatches | 400000
pipeline=interleaved pipeline.stages=1000 pipeline.chunks=1000 | pipeline.stages=1000: x pipeline.chunks | chunks=1
pipeline=interleaved pipeline.stages=1000 | pipeline.stages=1000: x pipeline.chunks=2 is more than the 6 units | 3
pipeline=1f1b pipeline.stages=7 | pipeline.stages=7: x pipeline.chunks=1 is more than the 6 units | 6
train.length_ramp=[9] | train.length_ramp=9: must be STEP:LENGTH | 200:512
train.length_ramp=[5:64,9:128] | train.length_ramp=5:64: the first length is that of the first steps | 0:64
train.length_ramp=[0:48,9:128] | train.length_ramp=0:48: must divide model.length=128 | 0:32, 0:64, 0:16
train.length_ramp=[0:64,9:32,12:128] | train.length_ramp=9:32: must be longer than the 64 tokens before | 9:128
train.length_ramp=[0:32,9:64,9:128] | train.length_ramp=9:128: must begin after 9:64 does | 10:128
train.length_ramp=[0:32,9:64] | train.length_ramp=9:64: the last length must be | 9:128, model.length=64
train.length_ramp=[0:1,9:128] tensor=1d_sp | train.length_ramp=0:1: model.length=1 is not divisible | 0:2, 0:4, 0:8
model.position_rows=64 | model.position_rows=64: the longest sequences have model.length=128 | 0, 128
elastic.faults=[3:burn:1] | elastic.faults=3:burn:1: must be STEP:KIND:RANK | 20:kill:3:backward
elastic.faults=[-1:kill:1] | elastic.faults=-1:kill:1: must be STEP:KIND:RANK | 20:kill:3
elastic.faults=["٣:kill:1"] | elastic.faults=٣:kill:1: must be STEP:KIND:RANK | 20:kill:3
elastic.faults=[0:kill:1] | elastic.faults=0:kill:1: its step must be from 1 | 1:kill:1
elastic.faults=[301:kill:1] | elastic.faults=301:kill:1: its step must be from 1 to train.steps=300 | 300:kill:1
elastic.faults=[5:kill:4] | elastic.faults=5:kill:4: its rank must be below the 4 | 5:kill:3
elastic.faults=[5:kill:999999] | elastic.faults=5:kill:999999: its rank must be below the 4 | 5:kill:3
elastic.faults=[5:kill:1:bakward] | elastic.faults=5:kill:1:bakward: a step has no section | 5:kill:1:backward
elastic.max_workers=2 elastic.min_workers=3 | elastic.max_workers=2: must be 0 or >= elastic.min_workers=3 | 0, 3
elastic.spares=1 cluster=inline | elastic.spares=1: cluster=inline is a world of one | 0
elastic.replan=true elastic.snapshot_every=0 | elastic.replan=true: a mesh re-forms from snapshots or | false
run.time_limit=soon | run.time_limit=soon: must be seconds or H:MM:SS | 3600
run.time_limit=1:2:3:4 | run.time_limit=1:2:3:4: must be seconds | 3600
run.time_limit=-5 | run.time_limit=-5: must be seconds | 3600
run.time_limit=nan | run.time_limit=nan: must be seconds | 3600
run.time_limit=1e300 | run.time_limit=1e300: must be <= 100000000 seconds | 100000000
resume.allow=[model.layers] run.dir=x | resume.allow=model.layers: | model.z_loss
resume.allow=[nope] run.dir=x | resume.allow=nope: no key of a run's identity
resume.allow=[optimizer.lr] | resume.allow=optimizer.lr: needs the run to go on from | run.dir=DIRECTORY
monitor.project='a/b c#' | monitor.project=a/b c#: W&B takes
monitor.project='' | monitor.project=: W&B takes
cluster.hardware=h10 | cluster.hardware=h10: there is no such file | h100
cluster.hardware=mine.yaml | cluster.hardware=mine.yaml: there is no such file | FILE.yaml
run.dir=/ | run.dir=/: is the root of the file system | a directory
run.dir=//// | run.dir=/: is the root
run.dir=~nosuchuser/x | run.dir=~nosuchuser/x: there is no user nosuchuser | ./~nosuchuser/x
run.dir=/dev/null | run.dir=/dev/null: cannot be used (/dev/null is no directory) | a directory
run.dir=/dev/null/x | run.dir=/dev/null/x: cannot be used | a directory
run.dir=s3://a/b | run.dir=s3://a/b: must be a path | a path
data.cache=/dev/null | data.cache=/dev/null: cannot be used (/dev/null is no directory) | a directory
data.cache=/ | data.cache=/: is the root | a directory
data.cache=~nosuchuser | data.cache=~nosuchuser: there is no user | ./~nosuchuser
data=text data.path=~nosuchuser/x | data.path=~nosuchuser/x: there is no user | ./~nosuchuser/x
checkpoint.url=/ | checkpoint.url=/: is the root | a directory
checkpoint.url=/dev/null/x | checkpoint.url=/dev/null/x: cannot be used | a directory
checkpoint.url=ftp://host/x | checkpoint.url=ftp://host/x: cannot be used: nothing can be saved through ftp | s3://
checkpoint.url=github://x | checkpoint.url=github://x: cannot be used: nothing can be saved through github | s3:
checkpoint.url=zip://x | checkpoint.url=zip://x: cannot be used: nothing can be saved through zip | a path
checkpoint.url=reference://x | checkpoint.url=reference://x: cannot be used: nothing can be saved | a path
checkpoint.url=http://x/y | checkpoint.url=http://x/y: cannot be used: nothing can be saved through http | a path
checkpoint.url=https://u:secret@x/y | checkpoint.url=https://x/y: cannot be used: nothing can be saved | a path
checkpoint.url=tar://x | checkpoint.url=tar://x: cannot be used: nothing can be saved | a path
checkpoint.url=git://x | checkpoint.url=git://x: cannot be used: nothing can be saved | a path
checkpoint.url=simplecache://x | checkpoint.url=simplecache://x: cannot be used: nothing can be saved | a path
checkpoint.url=data://x | checkpoint.url=data://x: cannot be used: nothing can be saved | a path
checkpoint.url=nosuch://x | checkpoint.url=nosuch://x: cannot be used: no storage is known by nosuch | a path
checkpoint.url=s3:// | checkpoint.url=s3://: cannot be used: names no place | s3://BUCKET/PATH
checkpoint.url=simplecache::s3://a/b | checkpoint.url=simplecache::s3://a/b: cannot be used: nothing | a path
checkpoint.resume=s3:// | checkpoint.resume=s3://: cannot be used: names no | a path
checkpoint.resume=nosuch://x | checkpoint.resume=nosuch://x: cannot be used: no storage is known | a path
tensor.axes={} tensor=1d tensor.axes.q=2 | tensor.axes.q=2: tensor=1d has no such axis | t
model.d_model=${model.heads}x | model.d_model=${model.heads}x: must be an integer
model.dropout=half | model.dropout=half: must be a number | 0.0
data=mixture data.sources={a.b:{path:x}} | data.sources=a.b: the name of a source has letters, digits and _
model.bias=maybe | model.bias=maybe: must be true or false | true
model.tied=2 model.bias=x | model.bias=x: must be true or false | false
elastic.replace=perhaps | elastic.replace=perhaps: must be true or false | true
monitor.tags=[''] | monitor.tags=: W&B takes
monitor.tensorboard=maybe | monitor.tensorboard=maybe: must be true or false | true
monitor.timeline=[] | monitor.timeline=[]: must be true or false | true
monitor.profile=10 | monitor.profile=10: must be a list
monitor.profile=[10] | monitor.profile=[10]: must be [] or [FIRST,LAST] | [10, 10]
monitor.profile=[0,3] | monitor.profile=[0, 3]: must be [FIRST,LAST] with 1 <= FIRST <= LAST <= train.steps=300 | [1, 3]
monitor.profile=[12,10] | monitor.profile=[12, 10]: must be [FIRST,LAST] | [12, 12]
monitor.profile=[299,301] | monitor.profile=[299, 301]: must be [FIRST,LAST] | [299, 300]
monitor.profile=[10,20] | monitor.profile=[10, 20]: must be at most 10 steps | [10, 19]
monitor.profile_ranks=[0] | monitor.profile_ranks=[0]: monitor.profile names no steps | monitor.profile=[10,12]
monitor.profile=[1,2] monitor.profile_ranks=[4] | monitor.profile_ranks=4: must be below the 4 ranks | 3
monitor.profile=[1,2] monitor.profile_ranks=[all] parallel.data=128 | monitor.profile_ranks=[all]: 256 | [0, 64, 128
monitor.profile=[1,2] monitor.profile_ranks=[one] | monitor.profile_ranks=one: must be ranks, or [all]
monitor.profile=[1,2] monitor.profile_ranks=[all,1] | monitor.profile_ranks=[all, 1]: must be ranks, or | [all]
tensor.async_products=yes | tensor.async_products=yes: unknown | on
train.pair_passes=yes | train.pair_passes=yes: unknown | on
train.pair_passes=on | train.pair_passes=on: no experts exchange tokens over ranks | auto
tensor=1d tensor.axes.t=2 tensor.async_products=on | tensor.async_products=on: no product with weights gathers | auto
"""
