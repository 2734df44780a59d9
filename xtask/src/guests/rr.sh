# Records programs with threads and replays them.
cd /tmp
export HOME=/tmp _RR_TRACE_DIR=/tmp/traces
for n in 1 2 3; do
    rr record -n $OPT/threads >recorded 2>errors || { cat errors; exit 1; }
    rr replay -a >replayed 2>errors || { cat errors; exit 1; }
    cmp recorded replayed && [ -s recorded ] && echo replayed $n
done
rr record -n --chaos $OPT/threads >recorded 2>errors || { cat errors; exit 1; }
rr replay -a >replayed 2>errors || { cat errors; exit 1; }
cmp recorded replayed && echo replayed chaos
