# Counts, and takes samples.
cd /tmp
count() { perf stat -x, -e $1 $OPT/counted $2 2>&1 | cut -d, -f1; }
for event in instructions:u branches:u; do
    a=$(count $event 1000000) b=$(count $event 3000000) c=$(count $event 3000000)
    echo $event: $((b - a)), and again $((c - b))
done
perf record -q -o perf.data -e instructions:u -c 100000 $OPT/counted 3000000
samples=$(perf script -i perf.data -F ip | wc -l)
[ $samples -ge 60 ] && [ $samples -le 70 ] && echo samples of instructions
perf record -q -o perf.data -F 500 $OPT/counted 1000000000
[ $(perf script -i perf.data -F ip | wc -l) -ge 20 ] && echo samples of cycles
perf report -i perf.data --stdio 2>/dev/null | grep -m1 'counted .* main'
