//! The programs of the suite, as data: what each needs of the host and what it runs.
//!
//! A script runs in the guest and, unless it is marked [`Expect::Lines`], on the host as well. Its standard output and
//! status have to be the same, so it prints results, and never times or addresses. `$OPT` is the folder of files that
//! are not part of the host's system.

/// What a program's output is compared with.
#[derive(Clone, Copy, Debug)]
pub(super) enum Expect {
    /// The same script on the host.
    Host,
    /// Status 0, and each of these lines somewhere in the output, which also has times in it.
    Lines(&'static [&'static str]),
}

/// A program of the suite.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) name: &'static str,
    /// Debian packages that contain the program.
    pub(super) packages: &'static [&'static str],
    /// Files and folders of the host that the guest gets. `*` at the end of a path's last part stands for any regular
    /// file or link.
    pub(super) paths: &'static [&'static str],
    /// The script for busybox's `sh`.
    pub(super) script: &'static str,
    pub(super) expect: Expect,
    pub(super) mem: &'static str,
    pub(super) cpus: u32,
    /// True if the program is part of CI's short run.
    pub(super) quick: bool,
}

/// Where the i386 busybox is below `$OPT`.
pub(super) const BUSYBOX_I386: &str = "busybox-i386";

/// A module of Debian's cloud kernel, which is found below `$OPT`. Its program boots that kernel.
pub(super) const MODULE: &str = "dummy.ko";

/// Programs that need Debian's full kernel, because the cloud kernel has no 16-bit segments.
pub(super) const FULL_KERNEL: [&str; 1] = ["segments"];

const PYTHON: &[&str] = &[
    "/usr/bin/python3",
    "/usr/lib/python$PYTHON/*.py",
    "/usr/lib/python$PYTHON/collections",
    "/usr/lib/python$PYTHON/encodings",
    "/usr/lib/python$PYTHON/importlib",
    "/usr/lib/python$PYTHON/json",
    "/usr/lib/python$PYTHON/lib-dynload",
    "/usr/lib/python$PYTHON/pathlib*",
    "/usr/lib/python$PYTHON/re",
];

const GCC: &[&str] = &[
    "/usr/bin/gcc",
    "/usr/bin/as",
    "/usr/bin/ld",
    "/usr/lib/gcc/x86_64-linux-gnu/$GCC/cc1",
    "/usr/lib/gcc/x86_64-linux-gnu/$GCC/collect2",
    "/usr/lib/gcc/x86_64-linux-gnu/$GCC/liblto_plugin.so",
    "/usr/lib/gcc/x86_64-linux-gnu/$GCC/lto-wrapper",
    "/usr/lib/gcc/x86_64-linux-gnu/$GCC/crt*.o",
    "/usr/lib/gcc/x86_64-linux-gnu/$GCC/libgcc.a",
    "/usr/lib/gcc/x86_64-linux-gnu/$GCC/libgcc_s.so",
    "/usr/lib/gcc/x86_64-linux-gnu/$GCC/include",
    "/usr/lib/x86_64-linux-gnu/*crt1.o",
    "/usr/lib/x86_64-linux-gnu/crti.o",
    "/usr/lib/x86_64-linux-gnu/crtn.o",
    "/usr/lib/x86_64-linux-gnu/libc.so",
    "/usr/lib/x86_64-linux-gnu/libc_nonshared.a",
    "/usr/lib/x86_64-linux-gnu/libm.so",
    "/lib/x86_64-linux-gnu/libgcc_s.so.1",
    "/lib/x86_64-linux-gnu/libm.so.6",
    "/lib/x86_64-linux-gnu/libmvec.so.1",
    "/usr/include/*.h",
    "/usr/include/x86_64-linux-gnu/bits",
    "/usr/include/x86_64-linux-gnu/gnu",
    "/usr/include/x86_64-linux-gnu/sys",
    "/usr/include/x86_64-linux-gnu/asm",
    "/usr/include/asm-generic",
    "/usr/include/linux",
];

/// All programs of the suite.
pub(super) const PROGRAMS: &[Program] = &[
    Program {
        name: "openssl",
        packages: &["openssl"],
        paths: &["/usr/bin/openssl"],
        script: r#"
            cd /tmp
            yes 'The quick brown fox jumps over the lazy dog' | head -c 300000 >plain
            for d in md5 sha1 sha224 sha256 sha384 sha512 sha3-256 sha3-512 blake2b512 ripemd160; do
                openssl dgst -$d plain || exit 1
            done
            key=000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f
            for c in aes-256-cbc aes-256-ctr aes-128-ofb camellia-256-cbc aria-256-ctr chacha20; do
                openssl enc -$c -K $key -iv 0f0e0d0c0b0a09080706050403020100 -in plain -out sealed 2>/dev/null || exit 2
                openssl dgst -sha256 sealed
                openssl enc -d -$c -K $key -iv 0f0e0d0c0b0a09080706050403020100 -in sealed 2>/dev/null | cmp - plain || exit 3
            done
            openssl genrsa -out rsa.pem 1024 2>/dev/null && openssl rsa -in rsa.pem -check -noout
            openssl dgst -sha256 -sign rsa.pem -out signature plain
            openssl rsa -in rsa.pem -pubout -out public.pem 2>/dev/null
            openssl dgst -sha256 -verify public.pem -signature signature plain || exit 4
            openssl ecparam -name prime256v1 -genkey -noout -out ec.pem
            openssl dgst -sha256 -sign ec.pem -out signature plain
            openssl ec -in ec.pem -pubout -out public.pem 2>/dev/null
            openssl dgst -sha256 -verify public.pem -signature signature plain || exit 5
            rm -f plain sealed signature rsa.pem ec.pem public.pem"#,
        expect: Expect::Host,
        mem: "256M",
        cpus: 1,
        quick: true,
    },
    Program {
        name: "openssl-speed",
        packages: &["openssl"],
        paths: &["/usr/bin/openssl"],
        script: r"
            for a in sha256 aes-256-gcm; do
                openssl speed -seconds 1 -bytes 4096 -evp $a 2>/dev/null | grep -i $a || exit 1
            done",
        expect: Expect::Lines(&["sha256 ", "AES-256-GCM "]),
        mem: "256M",
        cpus: 1,
        quick: false,
    },
    Program {
        name: "python",
        packages: &["python3"],
        paths: PYTHON,
        script: r#"
            export PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1
            python3 -S -c '
import math, cmath, json, re, hashlib, decimal, fractions, struct, zlib, random, itertools, statistics
r = random.Random(7)
xs = [r.uniform(-50, 50) for _ in range(300)]
for f in (math.sin, math.cos, math.tan, math.atan, math.exp, math.erf, math.tanh, math.asinh, math.cbrt, math.expm1):
    print(f.__name__, math.fsum(f(x) for x in xs).hex())
for f in (math.sqrt, math.log, math.log2, math.log10, math.gamma, math.lgamma):
    print(f.__name__, math.fsum(f(abs(x) + 1e-3) for x in xs).hex())
print([x.hex() for x in (1e308 * 10, -0.0, 5e-324, 2.0 ** -1074 / 2, math.pow(1.0000001, 1e7), math.fmod(1e300, 3.7))])
print(cmath.exp(1 + 2j), cmath.sqrt(-3 + 4j), (1 + 2j) ** 3.5)
print([round(x, 2) for x in xs[:20]], [int(x * 1e12) % 1000 for x in xs[:20]])
big = math.factorial(2000)
print(hashlib.sha256(str(big).encode()).hexdigest(), big.bit_length(), pow(3, big, 2 ** 521 - 1) % 10 ** 20)
print(big // 3 ** 500 % 10 ** 30, math.isqrt(big) % 10 ** 30, math.gcd(big, 7 ** 400))
decimal.getcontext().prec = 120
print(decimal.Decimal(2).sqrt(), decimal.Decimal(1).exp())
print(sum((fractions.Fraction(1, n) for n in range(1, 120)), fractions.Fraction(0)))
print(struct.pack("<efdqQ", 1.5, 2.7182818284, 3.14159, -5, 2 ** 63).hex(), zlib.crc32(bytes(range(256)) * 99))
print(json.dumps({str(k): [v, v ** 0.5] for k, v in enumerate(range(30))}))
print(len(re.findall(r"(\w+?)(\d+)", "ab12cd345 " * 500)), statistics.stdev(xs))
print(sorted(itertools.permutations(range(5)), key=lambda p: (p[2], -p[0]))[:3])
c = zlib.compress(str(big).encode() * 3, 9)
print(len(c), zlib.decompress(c) == str(big).encode() * 3)
def generator(n):
    for i in range(n):
        yield from (i, i * i)
print(sum(generator(20000)))
try:
    1 // 0
except ZeroDivisionError as e:
    print("caught", e)
'"#,
        expect: Expect::Host,
        mem: "512M",
        cpus: 1,
        quick: true,
    },
    Program {
        name: "sqlite",
        packages: &["sqlite3"],
        paths: &["/usr/bin/sqlite3"],
        script: r#"
            cd /tmp && rm -f t.db
            {
                echo 'create table t(a integer primary key, b text, c real); create index i on t(b); begin;'
                i=0
                while [ $i -lt 1000 ]; do
                    echo "insert into t values($i, 'row $((i * 7919 % 1000))', $i * 1.25 / 3);"
                    i=$((i + 1))
                done
                echo "commit; select count(*), sum(a), printf('%.10f', sum(c)), min(b), max(b) from t;"
                echo "delete from t where a % 3 = 0; vacuum; pragma integrity_check;"
                echo "select a, b, printf('%.6f', c) from t where b like 'row 9%' order by b, a limit 40;"
                echo "select x.a, y.a from t x join t y on x.a = y.a + 7 where x.c > 100 order by 1, 2 limit 10;"
            } | sqlite3 t.db
            status=$?
            rm -f t.db
            exit $status"#,
        expect: Expect::Host,
        mem: "256M",
        cpus: 1,
        quick: true,
    },
    Program {
        name: "zstd",
        packages: &["zstd"],
        paths: &["/usr/bin/zstd"],
        script: r"
            cd /tmp
            i=0; while [ $i -lt 20000 ]; do echo line $i $((i * i % 9973)) $((i * 31 % 257)); i=$((i + 1)); done >plain
            for level in 1 3 9 19; do
                zstd -q -f --single-thread -$level plain -o packed.zst || exit 1
                sha256sum packed.zst
                zstd -q -t packed.zst || exit 2
                zstd -q -d -c packed.zst | cmp - plain || exit 3
            done
            zstd -q -f -T2 -5 plain -o packed.zst && zstd -q -d -c packed.zst | sha256sum
            rm -f plain packed.zst",
        expect: Expect::Host,
        mem: "256M",
        cpus: 2,
        quick: true,
    },
    Program {
        name: "busybox-i386",
        packages: &[],
        paths: &[],
        script: r#"
            cd /tmp
            b=$OPT/busybox-i386
            $b uname -s && $b seq 1 2000 | $b sha1sum && $b seq 1 5000 | $b md5sum
            $b seq 1 3000 | $b sort -r | $b sha512sum
            $b seq 1 3000 | $b gzip -c | $b gunzip -c | $b sha256sum
            $b awk 'BEGIN { for (i = 1; i < 40; i++) printf "%.12g %.12g %.9e\n", sin(i), exp(i / 3), sqrt(i) * 1e-300 }'
            echo '2^200 % 10^9; scale=30; 1/7; sqrt(2)' | $b bc
            $b sh -c 'i=0; s=0; while [ $i -lt 3000 ]; do s=$((s + i * i)); i=$((i + 1)); done; echo $s'
            $b sh -c 'kill -SEGV $$'; echo signal $?
            $b seq 1 200 | $b xargs -n 3 $b echo | $b tail -n 2"#,
        expect: Expect::Host,
        mem: "256M",
        cpus: 1,
        quick: true,
    },
    Program {
        name: "hackbench",
        packages: &["rt-tests"],
        paths: &["/usr/bin/hackbench"],
        script: r"
            hackbench -g 2 -l 100 -f 5 && hackbench -g 2 -l 100 -f 5 -T && hackbench -p -g 1 -l 50 -f 5",
        expect: Expect::Lines(&["Time: "]),
        mem: "256M",
        cpus: 2,
        quick: true,
    },
    Program {
        name: "ssdd",
        packages: &["rt-tests"],
        paths: &["/usr/bin/ssdd"],
        script: "ssdd -f 10 -i 300",
        expect: Expect::Lines(&["PASS"]),
        mem: "256M",
        cpus: 2,
        quick: true,
    },
    Program {
        name: "perf-bench",
        packages: &["linux-perf"],
        paths: &["/usr/bin/perf"],
        script: r"
            perf bench sched pipe -l 2000 && perf bench sched messaging -g 1 -l 50 &&
            perf bench syscall basic -l 100000 && perf bench mem memcpy -s 4MB -f default && perf bench futex wake -w 2 -t 8",
        expect: Expect::Lines(&["usecs/op", "Total time:"]),
        mem: "512M",
        cpus: 2,
        quick: false,
    },
    Program {
        name: "gcc",
        packages: &["gcc", "libc6-dev"],
        paths: GCC,
        script: r#"
            cd /tmp && cat >p.c <<'END'
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
static jmp_buf where;
static void caught(int s) { longjmp(where, s); }
static int by_value(const void *a, const void *b) { int x = *(const int *)a, y = *(const int *)b; return (x > y) - (x < y); }
int main(void) {
    static int v[5000];
    uint32_t s = 12345;
    for (int i = 0; i < 5000; i++) { s = s * 1664525u + 1013904223u; v[i] = (int)(s >> 3) - 200000000; }
    qsort(v, 5000, sizeof *v, by_value);
    uint64_t h = 1469598103934665603ull;
    for (int i = 0; i < 5000; i++) h = (h ^ (uint32_t)v[i]) * 1099511628211ull;
    printf("%016llx %d %d\n", (unsigned long long)h, v[0], v[4999]);
    double m[12][12], t = 0;
    for (int i = 0; i < 12; i++) for (int j = 0; j < 12; j++) m[i][j] = 1.0 / (i + j + 1);
    for (int k = 0; k < 12; k++) for (int i = k + 1; i < 12; i++) for (int j = 11; j >= k; j--) m[i][j] -= m[k][j] * m[i][k] / m[k][k];
    for (int i = 0; i < 12; i++) t += log(fabs(m[i][i]));
    printf("%a %a %La\n", t, pow(2.5, 3.25), sqrtl(2.0L) * 3.0L);
    __int128 w = 1; for (int i = 2; i < 30; i++) w *= i;
    printf("%llx%016llx %d\n", (unsigned long long)(w >> 64), (unsigned long long)w, (int)(w % 1000003));
    signal(SIGFPE, caught); signal(SIGSEGV, caught); signal(SIGILL, caught);
    volatile int zero = 0; volatile int *null = 0;
    int n;
    if ((n = setjmp(where)) == 0) printf("%d\n", 1 / zero); else printf("signal %d\n", n);
    sigset_t all; sigfillset(&all); sigprocmask(SIG_UNBLOCK, &all, 0);
    if ((n = setjmp(where)) == 0) printf("%d\n", *null); else printf("signal %d\n", n);
    sigprocmask(SIG_UNBLOCK, &all, 0);
    if ((n = setjmp(where)) == 0) __builtin_trap(); else printf("signal %d\n", n);
    char text[64]; snprintf(text, sizeof text, "%.17g %e %g", 0.1, 1e-310, strtod("0x1.8p3", 0)); puts(text);
    return 42;
}
END
            for o in -O0 -O2 "-O3 -mavx2 -ffast-math" "-O2 -mfpmath=387"; do
                gcc $o -w -o p p.c -lm || exit 1
                ./p; echo status $?
            done
            gcc -O2 -w -S -o - p.c | sha256sum
            rm -f p p.c"#,
        expect: Expect::Host,
        mem: "1G",
        cpus: 1,
        quick: false,
    },
    Program {
        name: "perl",
        packages: &["perl-base"],
        paths: &["/usr/bin/perl", "/usr/lib/x86_64-linux-gnu/perl-base"],
        script: r#"
            PERL_HASH_SEED=0 PERL_PERTURB_KEYS=0 perl -e '
use strict;
my @sieve = (1) x 30000; my $n = 0;
for my $i (2 .. 29999) { next unless $sieve[$i]; $n++; for (my $j = $i * $i; $j < 30000; $j += $i) { $sieve[$j] = 0 } }
print "$n\n";
my %h; $h{$_ % 977} += $_ * 1.5 for 1 .. 40000;
print join(",", map { "$_=$h{$_}" } (sort { $h{$b} <=> $h{$a} || $a <=> $b } keys %h)[0 .. 9]), "\n";
my $text = join " ", map { "word$_" } 1 .. 3000;
(my $t = $text) =~ s/(\w)(\d+)/$2$1/g; print length($t), " ", unpack("%32C*", $t), "\n";
printf "%.15g %.15g %e %s\n", sin(1) * exp(2), atan2(1, 2), 2 ** -1070, 2 ** 64;
print pack("w*", 1 .. 300) eq pack("w*", 1 .. 300) ? "same\n" : "different\n";
my $pid = fork; if (!$pid) { exit 3 } waitpid $pid, 0; print $? >> 8, "\n";
$SIG{ALRM} = sub { print "alarm\n" }; alarm 1; select undef, undef, undef, 5;
'"#,
        expect: Expect::Host,
        mem: "256M",
        cpus: 1,
        quick: false,
    },
    // V8: code that is made, patched, moved and dropped.
    Program {
        name: "node",
        packages: &["nodejs"],
        paths: &["/usr/bin/node"],
        script: include_str!("node.sh"),
        expect: Expect::Host,
        mem: "1G",
        cpus: 2,
        quick: false,
    },
    // The kernel's own compiler: 400 random socket filters, 40 packets each.
    Program {
        name: "bpf-filters",
        packages: &["libc6-dev"],
        paths: &[],
        script: "$OPT/filters",
        expect: Expect::Host,
        mem: "256M",
        cpus: 2,
        quick: true,
    },
    // Code that is never writable where it is executed, as in .NET.
    Program {
        name: "generated-code",
        packages: &["libc6-dev"],
        paths: &[],
        script: "$OPT/generated",
        expect: Expect::Host,
        mem: "256M",
        cpus: 2,
        quick: true,
    },
    // A local descriptor table: 16-bit and 32-bit code in segments, its faults, single steps and breakpoints.
    Program {
        name: "segments",
        packages: &["libc6-dev"],
        paths: &[],
        script: "$OPT/segments",
        expect: Expect::Host,
        mem: "256M",
        cpus: 2,
        quick: true,
    },
    // Guests have protection keys on every host, so the program itself knows the right results.
    Program {
        name: "protection-keys",
        packages: &["libc6-dev"],
        paths: &[],
        script: "$OPT/keys",
        expect: Expect::Lines(&[
            "pkru 55555400",
            "write -1 14, read -1 14",
            "write 10 0, read -1 14",
            "executes 42, reads as 10",
            "all as PKRU says",
        ]),
        mem: "256M",
        cpus: 2,
        quick: true,
    },
    // A kernel that patches its own text: function tracing (tens of thousands of places at a
    // time), static keys, modules.
    Program {
        name: "kernel-text",
        packages: &[],
        paths: &[],
        script: r#"
            mount -t tracefs tracefs /sys/kernel/tracing && cd /sys/kernel/tracing || exit 1
            n=0
            while [ $n -lt 5 ]; do
                echo function >current_tracer && echo nop >current_tracer || exit 1
                n=$((n + 1))
            done
            n=0
            while [ $n -lt 30 ]; do
                echo 1 >events/sched/enable && ls / >/dev/null && grep -q sched_switch trace &&
                echo 0 >events/sched/enable && echo >trace || exit 2
                n=$((n + 1))
            done
            echo toggled $n
            n=0
            while [ $n -lt 100 ]; do
                insmod $OPT/dummy.ko && [ -e /sys/module/dummy ] && [ -e /sys/class/net/dummy0 ] || exit 3
                rmmod dummy && [ ! -e /sys/module/dummy ] || exit 4
                n=$((n + 1))
            done
            echo loaded $n"#,
        expect: Expect::Lines(&["toggled 30", "loaded 100"]),
        mem: "512M",
        cpus: 2,
        quick: false,
    },
    // Generated code that generates and patches code, four collector threads, implicit null checks.
    Program {
        name: "java",
        packages: &["openjdk-17-jdk-headless"],
        paths: &[
            "/usr/lib/jvm/java-17-openjdk-amd64/bin/java",
            "/usr/lib/jvm/java-17-openjdk-amd64/lib",
            "/usr/lib/jvm/java-17-openjdk-amd64/conf",
            "/etc/java-17-openjdk",
        ],
        script: r#"
            cd /tmp && cat >T.java <<'END'
import java.util.*;
public class T {
    static int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
    public static void main(String[] a) throws Exception {
        System.out.println(fib(27));
        HashMap<String, Integer> m = new HashMap<>();
        for (int i = 0; i < 50000; i++) m.merge("k" + i % 997, i, Integer::sum);
        long h = 0;
        for (var e : new TreeMap<>(m).entrySet()) h = h * 31 + e.getKey().hashCode() * (long) e.getValue();
        System.out.println(h);
        long[] r = new long[4];
        Thread[] t = new Thread[4];
        for (int k = 0; k < 4; k++) {
            int q = k;
            t[k] = new Thread(() -> { long s = q; for (int i = 0; i < 3000000; i++) s = s * 6364136223846793005L + 1442695040888963407L; r[q] = s; });
            t[k].start();
        }
        for (Thread x : t) x.join();
        System.out.println(Arrays.toString(r));
        double d = 0;
        for (int i = 1; i < 200000; i++) d += Math.sqrt(i) / (i + 0.5);
        System.out.println(d);
        for (int i = 0; i < 3; i++) try { Object o = i > 5 ? "" : null; o.hashCode(); } catch (NullPointerException e) { System.out.println("null"); }
        byte[][] garbage = new byte[64][];
        for (int i = 0; i < 20000; i++) garbage[i & 63] = new byte[i & 0x3fff];
        System.gc();
        System.out.println(garbage[63].length);
    }
}
END
            /usr/lib/jvm/java-17-openjdk-amd64/bin/java T.java
            status=$?
            rm -f T.java
            exit $status"#,
        expect: Expect::Host,
        mem: "3G",
        cpus: 2,
        quick: false,
    },
    // Single steps, breakpoints and data watchpoints through ptrace and the debug registers.
    Program {
        name: "gdb",
        packages: &["gdb", "libpython3-stdlib"],
        paths: &[
            "/usr/bin/gdb",
            "/usr/share/gdb",
            "/lib/x86_64-linux-gnu/libthread_db.so.1",
            "/usr/lib/python$PYTHON/*.py",
            "/usr/lib/python$PYTHON/collections",
            "/usr/lib/python$PYTHON/ctypes",
            "/usr/lib/python$PYTHON/encodings",
            "/usr/lib/python$PYTHON/importlib",
            "/usr/lib/python$PYTHON/lib-dynload",
            "/usr/lib/python$PYTHON/pathlib*",
            "/usr/lib/python$PYTHON/re",
        ],
        script: r#"
            cd /tmp && cat >commands <<'END'
set pagination off
set confirm off
break f if n == 12
run
watch g
continue
continue
p g
rwatch c[3]
continue
delete
stepi 25
p $rip
p $eflags
p $rax
thbreak h
continue
stepi 3
p $rip
finish
call f(20)
p g
kill
END
            gdb -q -batch -x commands $OPT/debuggee 2>&1 | grep -E '[vV]alue|^\$[0-9]|[bB]reakpoint|watchpoint'
            rm -f commands"#,
        expect: Expect::Host,
        mem: "768M",
        cpus: 2,
        quick: false,
    },
    // The counters of two runs differ by exact numbers; an overflow after a fixed number of instructions takes a
    // sample; and cycles are counted.
    Program {
        name: "perf",
        packages: &["linux-perf"],
        paths: &["/usr/bin/perf", "/usr/bin/objdump"],
        script: include_str!("perf.sh"),
        expect: Expect::Lines(&[
            "instructions:u: 4000000, and again 0",
            "branches:u: 2000000, and again 0",
            "samples of instructions",
            "samples of cycles",
            "several: 4000000 2000000 2000000 0, and again 0 0 0 0",
            "more events than counters, and each processor",
            "] main top",
            "annotated",
            "no last-branch records",
            "its own tests are good",
        ]),
        mem: "512M",
        cpus: 2,
        quick: true,
    },
    // A recording is replayed to the conditional branch: threads that race print again what they have printed.
    Program {
        name: "rr",
        packages: &["rr"],
        paths: &[
            "/usr/bin/rr",
            "/usr/bin/signal-rr-recording",
            "/usr/lib/rr/librraudit.so",
            "/usr/lib/rr/librrpage.so",
            "/usr/lib/rr/librrpreload.so",
            "/usr/lib/rr/rr_exec_stub",
            "/usr/share/rr/*.xml",
        ],
        script: include_str!("rr.sh"),
        expect: Expect::Lines(&["replayed 1", "replayed 2", "replayed 3", "replayed chaos"]),
        mem: "1G",
        cpus: 2,
        quick: false,
    },
];
