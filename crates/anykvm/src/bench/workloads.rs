//! The workloads as data: the script of each, and the bars that it counts for.
//!
//! A script is for busybox's `sh`, in the folder that has `program` (program.c), its
//! preprocessed source and the files that [`PREPARE`] makes; it prints one line
//! `@ NAME NANOSECONDS CHECKSUM`.

/// Workloads that are measured together, in one boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Suite {
    /// User-level computing.
    Compute,
    /// The kernel's work.
    Kernel,
    /// Comparison of one vCPU with two.
    Smp,
    /// Tables beyond the reach of TLBs.
    Memory,
}

/// A set of workloads with bars.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Group {
    /// Loops of integer instructions.
    Kernels,
    /// These loops, and programs of integer instructions.
    Integer,
    /// Real programs.
    Programs,
    /// Floating point, vectors, cryptographic instructions.
    Vector,
    Compiler,
    /// Processes, system calls, page faults, scheduling.
    System,
    /// Code that is generated or changed while it runs.
    Generated,
}

/// The bars of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bar {
    pub(super) group: Group,
    pub(super) name: &'static str,
    /// Maximum geometric mean of the time over native.
    pub(super) native: Option<f64>,
    /// Minimum geometric mean of TCG's time over ours.
    pub(super) tcg: Option<f64>,
    /// Minimum of TCG's time over ours, for each workload of the group.
    pub(super) tcg_each: f64,
}

const fn bar(group: Group, name: &'static str, native: Option<f64>, tcg: Option<f64>) -> Bar {
    Bar {
        group,
        name,
        native,
        tcg,
        tcg_each: 1.0,
    }
}

/// All bars.
pub(super) const BARS: &[Bar] = &[
    bar(Group::Kernels, "integer kernels", Some(2.0), None),
    bar(Group::Integer, "integer, with programs", None, Some(4.0)),
    bar(Group::Programs, "programs", Some(3.0), None),
    bar(Group::Vector, "FP and SIMD", Some(1.5), Some(15.0)),
    bar(Group::Compiler, "gcc", None, Some(4.0)),
    bar(Group::Generated, "generated code", None, None),
    Bar {
        tcg_each: 2.0,
        ..bar(Group::System, "system", None, Some(4.0))
    },
];

/// Maximum time of each compute workload, as a multiple of the native time.
pub(super) const WORST_NATIVE: f64 = 5.0;
/// Minimum speed of two vCPUs, as a multiple of that of one.
pub(super) const SCALING_BAR: f64 = 1.6;

/// A workload.
#[derive(Debug)]
pub(super) struct Workload {
    pub(super) name: &'static str,
    pub(super) suite: Suite,
    pub(super) groups: &'static [Group],
    pub(super) script: &'static str,
}

/// Makes a loop, which is also one of the integer workloads that are compared with TCG.
const fn kernel_loop(name: &'static str, script: &'static str) -> Workload {
    Workload {
        name,
        suite: Suite::Compute,
        groups: &[Group::Kernels, Group::Integer],
        script,
    }
}

const fn workload(
    name: &'static str,
    suite: Suite,
    groups: &'static [Group],
    script: &'static str,
) -> Workload {
    Workload {
        name,
        suite,
        groups,
        script,
    }
}

/// Makes the files that scripts find besides `program` and `program.i`.
pub(super) const PREPARE: &str = r#"
./program text 4000000 >text
head -c 600000 text >small
cat text text text text text text text text text text text text text text text text >big
cat >q.sql <<'END'
create table t(a integer primary key, b text, c real);
insert into t with recursive n(i) as (select 1 union all select i + 1 from n where i < 20000)
    select i, 'row ' || (i * 7919 % 20011), i * 1.25 / 3 from n;
create index x on t(b);
select count(*), sum(a), min(b), max(b) from t;
select sum(length(b)) from t where b like '%77%';
select count(*) from t p join t q on p.a = q.a + 7 where p.c > 100;
update t set c = c + 1 where a % 3 = 0;
select b, count(*) from t group by substr(b, 5, 2) order by 2 desc, 1 limit 5;
END
cat >bench.py <<'END'
def primes(n):
    s = bytearray([1]) * n
    for i in range(2, int(n ** 0.5) + 1):
        if s[i]:
            s[i * i::i] = bytes(len(range(i * i, n, i)))
    return sum(s) - 2
class Node:
    def __init__(self, v): self.v, self.l, self.r = v, None, None
    def put(self, v):
        n = self
        while True:
            if v < n.v:
                if n.l is None: n.l = Node(v); return
                n = n.l
            else:
                if n.r is None: n.r = Node(v); return
                n = n.r
x, root, words = 1, Node(1 << 30), {}
for i in range(15000):
    x = (x * 1103515245 + 12345) & 0x7fffffff
    root.put(x)
    words[str(x % 1000)] = words.get(str(x % 1000), 0) + 1
print(primes(200000), sum(words.values()), sorted(words.items())[:3], sum(i * i % 7 for i in range(60000)))
END
for n in 1 2 3 4; do cp program.i part$n.i; done
printf 'all: part1.s part2.s part3.s part4.s\n%%.s: %%.i\n\tgcc -O1 -S -o $@ $<\n' >Makefile
"#;

/// All workloads, in the order of the table.
pub(super) const WORKLOADS: &[Workload] = &[
    kernel_loop("sieve", "./program sieve"),
    kernel_loop("qsort", "./program qsort"),
    kernel_loop("hash64m", "./program hash64m"),
    kernel_loop("bytecode", "./program bytecode"),
    kernel_loop("fib", "./program fib"),
    workload(
        "vcall",
        Suite::Compute,
        &[Group::Kernels],
        "./program vcall",
    ),
    workload(
        "strings",
        Suite::Compute,
        &[Group::Kernels],
        "./program strings",
    ),
    workload("crc", Suite::Compute, &[Group::Kernels], "./program crc"),
    workload(
        "zstd",
        Suite::Compute,
        &[Group::Programs, Group::Integer],
        "./program run zstd out zstd -q -c -9 --single-thread text",
    ),
    workload(
        "xz",
        Suite::Compute,
        &[Group::Programs],
        "./program run xz out xz -c -6 -T1 small",
    ),
    workload(
        "sqlite",
        Suite::Compute,
        &[Group::Programs, Group::Integer],
        "./program run sqlite out sqlite3 :memory: '.read q.sql'",
    ),
    workload(
        "python",
        Suite::Compute,
        &[Group::Programs, Group::Integer],
        "PYTHONHASHSEED=0 ./program run python out $PYTHON -S bench.py",
    ),
    workload(
        "gcc",
        Suite::Compute,
        &[Group::Programs, Group::Compiler],
        "./program run gcc out gcc -O2 -S -o - program.i",
    ),
    workload(
        "sha256",
        Suite::Compute,
        &[Group::Programs, Group::Vector],
        "./program run sha256 out openssl dgst -sha256 big",
    ),
    workload(
        "aes",
        Suite::Compute,
        &[Group::Programs, Group::Vector],
        "./program run aes out openssl mac -cipher AES-256-CBC -macopt hexkey:000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f -in big CMAC",
    ),
    workload(
        "matmul",
        Suite::Compute,
        &[Group::Vector],
        "./program matmul",
    ),
    workload("nbody", Suite::Compute, &[Group::Vector], "./program nbody"),
    workload("x87", Suite::Compute, &[Group::Vector], "./program x87"),
    workload("fma8", Suite::Compute, &[Group::Vector], "./program fma8"),
    workload("memcpy", Suite::Compute, &[], "./program memcpy"),
    workload("smc", Suite::Compute, &[Group::Generated], "./program smc"),
    workload(
        "generate",
        Suite::Compute,
        &[Group::Generated],
        "./program generate",
    ),
    workload(
        "hackbench-1",
        Suite::Kernel,
        &[Group::System],
        "./program run hackbench-1 none hackbench -g 1 -l 60",
    ),
    workload(
        "hackbench-5",
        Suite::Kernel,
        &[Group::System],
        "./program run hackbench-5 none hackbench -g 5 -l 12",
    ),
    workload(
        "ssdd",
        Suite::Kernel,
        &[Group::System],
        "./program run ssdd none ssdd -f 10 -i 300",
    ),
    workload(
        "sched-pipe",
        Suite::Kernel,
        &[Group::System],
        "./program run sched-pipe none perf bench sched pipe -l 10000",
    ),
    workload(
        "switches",
        Suite::Kernel,
        &[Group::System],
        "./program switches",
    ),
    workload("forks", Suite::Kernel, &[Group::System], "./program forks"),
    workload("execs", Suite::Kernel, &[Group::System], "./program execs"),
    workload(
        "pagefaults",
        Suite::Kernel,
        &[Group::System],
        "./program pagefaults",
    ),
    workload(
        "syscalls",
        Suite::Kernel,
        &[Group::System],
        "./program syscalls",
    ),
    workload(
        "make-j2",
        Suite::Smp,
        &[],
        "rm -f part*.s; ./program run make-j2 none make -s -j2; cat part*.s | md5sum >&2",
    ),
    workload(
        "hackbench-T",
        Suite::Smp,
        &[],
        "./program run hackbench-T none hackbench -g 5 -l 30",
    ),
    workload("loops2", Suite::Smp, &[], "./program loops2"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workload_s_script_names_it() {
        for w in WORKLOADS {
            let named = w.script.contains(&format!("./program {}", w.name))
                || w.script.contains(&format!("run {} ", w.name));
            assert!(named, "{}", w.name);
            assert_eq!(WORKLOADS.iter().filter(|o| o.name == w.name).count(), 1);
        }
    }

    #[test]
    fn every_bar_has_workloads() {
        for bar in BARS {
            assert!(WORKLOADS.iter().any(|w| w.groups.contains(&bar.group)));
        }
    }
}
