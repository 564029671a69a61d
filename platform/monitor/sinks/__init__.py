"""Services, such as Weights & Biases, that a run's numbers and events are sent to, each by a process of its own that
follows the run's files.

The driver starts these processes and knows nothing else of them (`sink_process`). A process reads `metrics.jsonl` and
`journal.jsonl` as they grow (`follower`), and remembers in `RUN_DIR/sinks/` up to where it has sent them: so a service
that is slow, fails or is away costs the run nothing, and gets later what it has missed.

Its files in reading order: follower, sink_process, alerts, wandb_sink, other_sinks.
"""
