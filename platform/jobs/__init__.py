"""Jobs: manifests for Kubernetes and scripts for Slurm, written from a run's plan, and what runs inside of them: Ray on
every node, and the supervisor that starts a lost driver again. `python -m platform.jobs` also prints the status and the
logs of a job.

Its files in reading order: kubernetes, job_state, job_options, planned_run, pods, rank, ray_node, slurm, supervisor.
"""
