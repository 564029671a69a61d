"""Crew: the worker processes of a run behind one interface (`Crew`), started by any of several launchers;
`launchers.py` chooses the launcher. Heartbeats, links, failures and processors of workers are seen here. Nothing here
knows about steps, plans or checkpoints.

Its files in reading order: crew, failures, signals, remote_crew, heartbeats, job, launchers, worker_host,
fork_server, forked_workers, ray_process, ray_actors, ray_session, torchrun, inline_crew, leftovers, channel,
switchboard.
"""
