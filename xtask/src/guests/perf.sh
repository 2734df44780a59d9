# Counts, and takes samples.
cd /tmp
# Where the host is busy, interrupts take long: perf would sample less.
echo 0 > /proc/sys/kernel/perf_cpu_time_max_percent
# The C library looks at strings in another way where they end near a page's end.
echo 0 > /proc/sys/kernel/randomize_va_space
count() { perf stat -x, -e $1 $OPT/counted $2 2>&1 | cut -d, -f1; }
for event in instructions:u branches:u; do
    a=$(count $event 1000000) b=$(count $event 3000000) c=$(count $event 3000000)
    echo $event: $((b - a)), and again $((c - b))
done
perf record -q -o perf.data -e instructions:u -c 100000 $OPT/counted 3000000
samples=$(perf script -i perf.data -F ip | wc -l)
[ $samples -ge 60 ] && [ $samples -le 70 ] && echo samples of instructions || echo $samples samples
perf record -q -o perf.data -F 500 $OPT/counted 1000000000
[ $(perf script -i perf.data -F ip | wc -l) -ge 20 ] && echo samples of cycles
perf report -i perf.data --stdio 2>/dev/null | grep -m1 'counted .* main'

# Several streams at once: instructions, and of branches all, the conditional ones and returns.
# Intel's event of conditional branches has another unit mask from Ice Lake on. These models are older; a host with AVX-512 is
# shown as one of them.
older=" 60 61 63 69 70 71 78 79 85 86 94 102 142 158 165 166 "
model=$(awk '/^model\t/ { print $3; exit }' /proc/cpuinfo)
conditional=r11c4:u
[ "${older#* $model }" != "$older" ] && conditional=r1c4:u
kinds=rc4:u,$conditional,r8c4:u
grep -q AuthenticAMD /proc/cpuinfo && kinds=rc2:u,rd1:u,rc8:u
counts() { perf stat -x, -e instructions:u,$kinds $OPT/counted $1 2>&1 | cut -d, -f1 | tr '\n' ' '; }
set -- $(counts 1000000) $(counts 3000000) $(counts 3000000)
echo several: $(($5 - $1)) $(($6 - $2)) $(($7 - $3)) $(($8 - $4)), and again $(($9 - $5)) $((${10} - $6)) $((${11} - $7)) $((${12} - $8))
# More events than counters: they take turns, for a share of the time each.
shares=$(perf stat -x, -e instructions:u,branches:u,cycles:u,$kinds,instructions:k,branches:k,cycles:k,ref-cycles,instructions,branches \
    $OPT/counted 300000000 2>&1 | cut -d, -f1,5 | grep -c '^[1-9][0-9]*,[1-9][0-9]*\.')
[ $shares -ge 11 ] && [ $(perf stat -x, -a -A -e instructions sleep 0.2 2>&1 | grep -c '^CPU[01],[1-9]') -eq 2 ] &&
    echo more events than counters, and each processor
$OPT/counted 100000000000 & busy=$!
(sleep 6; echo q) | timeout 20 perf top --stdio -d 1 2>&1 | grep -m1 -o 'counted .* main' | sed 's/$/ top/'
kill $busy
perf annotate -i perf.data --stdio -s main 2>/dev/null | grep -m1 -o 'jne .*' && echo annotated
# There are no last-branch records, which perf is told by its kernel.
for how in -b "--call-graph lbr"; do
    perf record -q $how -o branches.data true 2>&1 | grep "doesn't support branch stack sampling"
done > branches
[ $(wc -l < branches) -eq 2 ] && echo no last-branch records
# perf's own tests of events, as far as they look at no C library (the guest's programs are static) and at no time limit.
names='mmap interface tests|Software clock events period values|Event times|Convert perf time to TSC|Sigtrap|x86 bp modify|x86 Sample parsing'
perf test $(perf test list 2>&1 | grep -E ": ($names)\$" | cut -d: -f1) > tests 2>&1
[ $(grep -c ': Ok' tests) -ge 7 ] && ! grep FAILED tests && echo its own tests are good
