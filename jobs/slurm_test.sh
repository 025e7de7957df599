#!/usr/bin/env bash
# Slurm for real: this machine becomes two nodes of 4 CPUs, and the jobs that people submit run there, without GPUs and
# small. For Debian or Ubuntu, as root (a container, a virtual machine); not part of test.sh. About 7 minutes.
#   jobs/slurm_test.sh            a line for each check; exit code 1 if one of them failed
# See environment.sh for the variables. Slurm's files and logs lie in a temporary folder, which is kept after a failure.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
place=$(mktemp -d /tmp/distconv-slurm.XXXXXX)
chmod 755 "$place"
export SLURM_CONF=$place/slurm.conf OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# Two nodes on one host: the files of Open MPI's shared memory would have the same names.
export OMPI_MCA_btl=tcp,self PATH=$venv/bin:$PATH
failures=0 checks=0 passed=false

# -- the cluster ------------------------------------------------------------------------------------------------------

packages() {
    command -v slurmctld munged mpiexec.openmpi >/dev/null && [ -e /usr/lib/*/libpmix.so.2 ] && return
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends \
        slurm-wlm munge openmpi-bin libopenmpi3 libpmix2 >"$place/apt.log"
}

start() {
    mkdir -p "$place"/{state,n1,n2,log,munge}
    mungekey --create --keyfile "$place/munge/key"
    chown -R munge:munge "$place/munge"
    runuser -u munge -- munged --socket "$place/munge/socket" --key-file "$place/munge/key" \
        --pid-file "$place/munge/pid" --log-file "$place/munge/log" --seed-file "$place/munge/seed"
    local port=$((20000 + $$ % 10000 * 4)) host node
    host=$(hostname)
    # MpiDefault: what MPICH's wheel speaks. config_overrides: more CPUs than there are. cred_expire: a job that goes back
    # into the queue waits until its credential is over.
    cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=$place/munge/socket,cred_expire=15
StateSaveLocation=$place/state
SlurmdSpoolDir=$place/%n
TmpFS=$place/%n
SlurmctldPidFile=$place/slurmctld.pid
SlurmdPidFile=$place/slurmd-%n.pid
SlurmctldLogFile=$place/log/slurmctld
SlurmdLogFile=$place/log/slurmd-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=pmi2
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
LaunchParameters=use_interactive_step
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=4 RealMemory=8000
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=4 RealMemory=8000
PartitionName=all Nodes=n1,n2 Default=YES State=UP
CONF
    slurmctld
    for node in n1 n2; do slurmd -N "$node"; done
    for _ in $(seq 30); do
        [ "$(sinfo -h -t idle -o %D)" = 2 ] && return
        sleep 1
    done
    return 1
}

end() {
    local each
    scancel --user root >/dev/null 2>&1 || true
    sleep 1
    for each in "$place"/slurmd-n1.pid "$place"/slurmd-n2.pid "$place"/slurmctld.pid "$place"/munge/pid; do
        [ ! -s "$each" ] || kill "$(cat "$each")" || true
    done
    if "$passed"; then rm -rf "$place"; else echo "logs: $place"; fi
}
trap end EXIT

# Debian's Open MPI: mpi4py takes it where the environment has no library of its own; all else is that of the first one.
with_open_mpi() {
    python -m venv "$place/openmpi"
    "$place/openmpi/bin/pip" install --quiet --no-deps --constraint "$constraints" mpi4py
    python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$("$place/openmpi/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/all-else.pth"
}

# -- checks -----------------------------------------------------------------------------------------------------------

# check TITLE COMMAND...: a line that says how it ended; what it printed in a log, the last of it shown when it failed.
check() {
    local title=$1 begin=$SECONDS status=0 log
    shift
    checks=$((checks + 1))
    log=$place/log/check-$checks
    ("$@") >"$log" 2>&1 || status=$?
    if [ "$status" = 0 ]; then
        printf '  ok      %3d s  %s%s\n' $((SECONDS - begin)) "$title" "$(sed -n 's/^>>/: /p' "$log" | tail -1)"
    else
        failures=$((failures + 1))
        printf '  FAILED  %3d s  %s (exit code %s)\n' $((SECONDS - begin)) "$title" "$status"
        tail -15 "$log" | sed 's/^/          /'
    fi
}

# submit SBATCH-OPTION... SCRIPT ARGUMENT...: its number.
submit() { sbatch --parsable --output "$place/log/job-%j" "$@"; }

# finished JOB [RESTARTS]: waits for its end, which must be a good one, after so many restarts at least.
finished() {
    local shown
    for _ in $(seq 400); do
        shown=$(scontrol show job -o "$1")
        case $shown in *JobState=PENDING* | *JobState=RUNNING* | *JobState=COMPLETING*) sleep 1 ;; *) break ;; esac
    done
    tail -20 "$place/log/job-$1"
    sed -n 's/^stopped .*after \(step [0-9]*\).*/>>stopped after \1/p' "$place/log/job-$1" | tail -1
    [[ $shown == *JobState=COMPLETED*ExitCode=0:0* ]] || { echo "$shown"; return 1; }
    local restarts=${shown#*Restarts=}
    [ "${restarts%% *}" -ge "${2:-0}" ] || { echo "it never went back into the queue: $shown"; return 1; }
}

# has_lines FILE: waits until it has 40.
has_lines() {
    for _ in $(seq 240); do
        [ ! -e "$1" ] || [ "$(wc -l <"$1")" -lt 40 ] || return 0
        sleep 0.5
    done
    return 1
}

# stopped_by_hand JOB FILE: sends USR1 when FILE has 40 lines.
stopped_by_hand() { has_lines "$2" && scancel --signal=USR1 "$1"; }

# stopped_by_limit JOB FILE: when FILE has 40 lines, the job's time is over in two minutes at most, which is when its
# --signal=USR1@100 is due; in its second run it has an hour again. Slurm looks every half minute.
stopped_by_limit() {
    has_lines "$2"
    local ran
    ran=$(scontrol show job -o "$1" | sed 's/.*RunTime=00:0*\([0-9]*\):.*/\1/')
    scontrol update JobId="$1" TimeLimit=$((${ran:-0} + 2))
    for _ in $(seq 120); do
        [ "$(squeue -h -j "$1" -o %T)" = RUNNING ] || { scontrol update JobId="$1" TimeLimit=60; return; }
        sleep 1
    done
    return 1
}

# went_on RUN REFERENCE: every step was taken once, in order, with the loss of a run that nobody disturbed.
went_on() {
    python - "$@" <<'PYTHON'
import json, re, sys

def losses(path):
    lines = open(path).read().splitlines()
    if path.endswith(".jsonl"):
        return [(line["step"], line["loss"]) for line in map(json.loads, lines) if "lr" in line]
    return [(int(found[1]), float(found[2])) for found in (re.match(r"step (\d+) loss (\S+)", line) for line in lines) if found]

run, reference = losses(sys.argv[1]), losses(sys.argv[2])
steps = [step for step, _ in run]
assert steps == list(range(1, len(reference) + 1)), steps
assert run == reference, next(pair for pair in zip(run, reference) if pair[0] != pair[1])
print(f">>{len(run)} steps with the losses of the undisturbed run")
PYTHON
}

# told COMMAND...: a wrong launch is told in one sentence and ends with an error code within 5 s.
told() {
    local begin status=0 seconds
    begin=$(date +%s%N)
    "$@" >"$place/told" 2>&1 || status=$?
    seconds=$((($(date +%s%N) - begin) / 100000000))
    cat "$place/told"
    echo ">>exit code $status after $((seconds / 10)).$((seconds % 10)) s"
    [ "$status" != 0 ] && [ "$(grep -c 'LaunchError: ' "$place/told")" -ge 1 ] && [ "$seconds" -lt 50 ] && ! grep -q trains "$place/told"
}

# prints TEXT COMMAND...: it ends well, with this line.
prints() {
    "${@:2}" >"$place/printed" 2>&1 || { cat "$place/printed"; return 1; }
    cat "$place/printed"
    grep -qx "$1" "$place/printed"
}

# -- what people do ---------------------------------------------------------------------------------------------------

cpu=(--gpus-per-node=0 --ntasks-per-node=2 --cpus-per-task=1)
small=(--device cpu --checkpoint-every 50)
mesh() { submit "${cpu[@]}" jobs/train_mesh.sbatch "$place/mesh.h5" "$1" --grid n=2,h=2 --width 4 --steps 120 "${small[@]}"; }
classify() {
    local options=("${cpu[@]}" "${@:2}")
    submit "${options[@]}" jobs/train_classify.sbatch digits lenet5 "$1" --grid n=2,h=2 --batch 32 --steps 1500 "${small[@]}"
}
own() { submit "${cpu[@]}" jobs/train_own.sbatch examples/stop_and_go.py --grid n=2,h=2 --steps 400 --out "$1"; }

mpi_starts() {
    local single last
    single=$(python examples/stop_and_go.py --steps 5 --out "$place/single" | tail -1)
    echo "one process: $single"
    check "srun -N 2 -n 4 --mpi=pmi2, MPICH's wheel: the loss of one process" prints "$single" \
        srun -N 2 -n 4 --mpi=pmi2 distconv run examples/stop_and_go.py --grid n=2,h=2 --steps 5 --out "$place/mpich"
    check "srun -N 2 -n 4 --mpi=pmix, Debian's Open MPI: the same" prints "$single" \
        srun -N 2 -n 4 --mpi=pmix "$open_mpi" -m distconv run examples/stop_and_go.py --grid n=2,h=2 --steps 5 --out "$place/pmix"
    cat >"$place/mpiexec.sbatch" <<BATCH
#!/usr/bin/env bash
mpiexec -n 4 distconv run examples/stop_and_go.py --grid n=2,h=2 --steps 5 --out "$place/hydra"
mpiexec.openmpi -n 4 "$open_mpi" -m distconv run examples/stop_and_go.py --grid n=2,h=2 --steps 5 --out "$place/orte"
BATCH
    last=$(submit -N 2 --ntasks-per-node=2 "$place/mpiexec.sbatch")
    check "mpiexec of both in a batch script, over two nodes" finished "$last"
    check "   the loss of one process, twice" [ "$(grep -cx "$single" "$place/log/job-$last")" = 2 ]
}

jobs_end() {
    distconv data mesh --size 128 --samples 8 --out "$place/mesh.h5" >"$place/log/data" 2>&1
    local job
    job=$(mesh "$place/mesh-undisturbed")
    check "sbatch train_mesh" finished "$job"
    job=$(own "$place/own-undisturbed")
    own_undisturbed=$place/log/job-$job
    check "sbatch train_own" finished "$job"
    job=$(classify "$place/classify-undisturbed")
    check "sbatch train_classify" finished "$job"
}

jobs_go_on() {
    local job
    job=$(mesh "$place/mesh-signalled")
    check "scancel --signal=USR1 to train_mesh" stopped_by_hand "$job" "$place/mesh-signalled/metrics.jsonl"
    check "   it goes back into the queue and ends well" finished "$job" 1
    check "   it went on" went_on "$place/mesh-signalled/metrics.jsonl" "$place/mesh-undisturbed/metrics.jsonl"
    job=$(own "$place/own-signalled")
    check "scancel --signal=USR1 to train_own" stopped_by_hand "$job" "$place/log/job-$job"
    check "   it goes back into the queue and ends well" finished "$job" 1
    check "   it went on" went_on "$place/log/job-$job" "$own_undisturbed"
    job=$(classify "$place/classify-limited" --time=60 --signal=USR1@100)
    check "train_classify comes to the end of its time" stopped_by_limit "$job" "$place/classify-limited/metrics.jsonl"
    check "   it goes back into the queue and ends well" finished "$job" 1
    check "   it went on" went_on "$place/classify-limited/metrics.jsonl" "$place/classify-undisturbed/metrics.jsonl"
}

launches() {
    cat >"$place/train.py" <<'PYTHON'
import distconv as dc
from mpi4py import MPI
dc.ProcessGrid(n=MPI.COMM_WORLD.size)
print("trains on", MPI.COMM_WORLD.size, flush=True)
PYTHON
    local train=$place/train.py last
    check "wrong: srun --mpi=none, MPICH" told srun -n 4 --mpi=none python "$train"
    check "wrong: srun --mpi=pmix, MPICH" told srun -N 1 -n 4 --mpi=pmix python "$train"
    check "wrong: srun --mpi=none distconv info" told srun -n 4 --mpi=none distconv info
    check "wrong: srun --mpi=none, Debian's Open MPI" told srun -n 4 --mpi=none "$open_mpi" "$train"
    check "wrong: mpiexec of Open MPI, MPICH" told mpiexec.openmpi --oversubscribe -n 3 python "$train"
    check "wrong: mpiexec of MPICH, Open MPI" told mpiexec -n 3 "$open_mpi" "$train"
    check "wrong: torchrun" told torchrun --nproc-per-node 2 "$train"
    check "wrong: srun --mpi=pmi2 torchrun" told srun -n 1 --mpi=pmi2 torchrun --nproc-per-node 2 "$train"
    check "right: srun -n 1" prints "trains on 1" srun -n 1 python "$train"
    check "right: salloc -n 4, serial" prints "trains on 1" salloc -n 4 python "$train"
    check "right: the shell of salloc -n 4, serial" grep -q "trains on 1" <(echo "python $train; exit" | salloc -n 4 2>&1)
    check "right: srun --mpi=none, DISTCONV_LAUNCH=trust" prints "trains on 1" \
        env DISTCONV_LAUNCH=trust srun -n 2 --mpi=none python "$train"
    printf '#!/usr/bin/env bash\npython %s\nmpiexec -n 3 python %s\n' "$train" "$train" >"$place/serial.sbatch"
    last=$(submit -N 2 -n 4 "$place/serial.sbatch")
    check "right: a batch script for 4 tasks with a serial command and mpiexec -n 3" finished "$last"
    check "   on 1 and on 3 ranks" [ "$(grep -c "trains on 1" "$place/log/job-$last") $(grep -o "on 3\| 3" "$place/log/job-$last" | wc -l)" = "1 3" ]
}

stage "installation" install mesh,plot
stage "Slurm and Open MPI" packages
open_mpi=$place/openmpi/bin/python
stage "an environment for Open MPI" with_open_mpi
stage "two nodes" start
sinfo
echo "== launches"
launches
echo "== both MPIs"
mpi_starts
echo "== jobs"
jobs_end
echo "== jobs that are stopped"
jobs_go_on
echo "$checks checks, $failures failed, $SECONDS s"
[ "$failures" != 0 ] || passed=true
"$passed"
