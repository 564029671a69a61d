# Variables from files that only you can read: Slurm keeps what sbatch and srun are given, and shows it.
secret() { # NAME FILE [must]: without `must`, the file may be missing, and a variable that sbatch brought along wins
  if [[ ${3:-} && ! -r $2 ]]; then
    echo "job: $2, which job.secrets names, cannot be read" >&2
    exit 2
  elif [[ ! ${3:-} && (-v $1 || ! -r $2) ]]; then
    return 0
  fi
  [[ $(stat --dereference --format=%a "$2") == *00 ]] || echo "job: others can read $2: chmod 600 $2"
  IFS= read -r "$1" <"$2" || true # its only line may have no end; `set -x` does not show what is read
  export "${1?}"
}
@{files}
