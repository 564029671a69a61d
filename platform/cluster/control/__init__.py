"""Control loop of a run: steps, loss spikes, slow workers, failures. `GenerationFormer` forms a generation of workers,
`Checkpoints` saves and restores, `StepForecaster` predicts steps, and `StepProfiles` merges the profiles that workers
write into one trace.

Its files in reading order: controller, evaluations, former, references, teacher, questions, recruiter, examination,
checkpoints, profiles, run_context, pulse.
"""
