"""Training inside one worker: `worker.py` answers the driver's calls. The doctor's checks, the proof of a process's
environment, the replies and files of workers, and the choice of the state that they recover from are here. Starting
processes and choosing the members of a mesh are left to the driver.

Its files in reading order: worker, worker_records, trainer, rehearsal, rank_model, stage_passes, pass_recorder,
rank_parameters, training_state, state_forms, step_report, faults, state_recovery, environment_proof, generator, health,
measurements, gauges, calibration_rates, replies, step_profile.
"""
