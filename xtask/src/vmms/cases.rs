//! Which machines QEMU is to be, and what their guests check.

use super::{
    Case,
    Part::{self, All, Normal, Quick},
    Run, Setup, driven, live, models, nested, traced,
};

/// QEMU's words, which do not depend on what KVM offers: since 10.0 it uses KVM with KVM's own LAPICs only.
const NO_USER_APIC: &str = "KVM does not support userspace APIC";

const fn qemu(name: &'static str, part: Part, arguments: &'static str) -> Case {
    Case {
        name,
        part,
        run: Run::Cloud,
        arguments,
        cpus: 1,
        mem_mib: 256,
        append: "",
        check: "true",
        refusal: None,
    }
}

/// A migration of a running guest with two processors.
const fn live(
    name: &'static str,
    part: Part,
    arguments: &'static str,
    run: fn(&Setup, &[&str]) -> Result<(), String>,
) -> Case {
    Case {
        run: Run::Live(run),
        cpus: 2,
        ..qemu(name, part, arguments)
    }
}

/// A processor that anykvm itself has as its host's.
const fn host(name: &'static str, part: Part, arguments: &'static str) -> Case {
    Case {
        run: Run::Driven(nested::boots_a_guest),
        mem_mib: 1536,
        ..qemu(name, part, arguments)
    }
}

/// The guest's view of a disk that is equal to `{dir}/data.img`.
const SAME_DISK: &str = "same $(cat $(ls /dev/vda /dev/sda /dev/nvme0n1) | sum) $data";

/// The kernel has found Hyper-V, and goes by its page of the reference time.
const HYPERV: &str = "dmesg | grep 'Hypervisor detected: Microsoft Hyper-V' && same $(cat /sys/devices/system/clocksource/clocksource0/current_clocksource) hyperv_clocksource_tsc_page";

/// It also has its timers from there, and flushes the other processor's TLB by hypercalls.
const HYPERV_TIMERS: &str = "dmesg | grep 'Hyper-V: Using hypercall for remote TLB flush' && same $(sed 's/ /-/g' /sys/devices/system/clockevents/clockevent1/current_device) Hyper-V-clockevent";

/// QEMU's words before 8.0, which does not play Xen.
const NO_XEN: &str = "Property 'kvm-accel.xen-version' not found";

/// The kernel has found Xen, goes by its clock, has its timers and interrupts by event channels, and reads its disk.
const XEN: &str = "dmesg | grep 'Hypervisor detected: Xen HVM' && same $(cat /sys/devices/system/clocksource/clocksource0/current_clocksource) xen && grep 'xen-percpu.*timer1' /proc/interrupts && same $(sum < /dev/xvda) $data";

/// The matrix.
pub(super) const CASES: &[Case] = &[
    qemu("pc", Quick, ""),
    Case {
        cpus: 2,
        mem_mib: 512,
        ..qemu("q35-2-cpus", Quick, "-M q35 -cpu host")
    },
    Case {
        cpus: 4,
        ..qemu("4-cpus", Normal, "-cpu max")
    },
    qemu("microvm", Quick, "-M microvm"),
    // Without ACPI the machine has nothing else to be reset by.
    Case {
        append: "reboot=t",
        ..qemu("microvm-no-acpi", Normal, "-M microvm,acpi=off")
    },
    Case {
        cpus: 2,
        ..qemu("split-irqchip", Quick, "-M q35,kernel-irqchip=split")
    },
    // More CPUs hang QEMU 7.2 itself: it never takes back CPU_INTERRUPT_SIPI without in-kernel APICs.
    Case {
        refusal: Some(NO_USER_APIC),
        ..qemu("no-irqchip", Quick, "-M pc,kernel-irqchip=off")
    },
    Case {
        refusal: Some(NO_USER_APIC),
        ..qemu(
            "no-irqchip-q35",
            Normal,
            "-M q35,kernel-irqchip=off -cpu host",
        )
    },
    Case {
        run: Run::Driven(models::enforced),
        ..qemu("models", Quick, "")
    },
    // XSAVE, RDTSCP and SSSE3 are missing.
    host("host-qemu64", Quick, "-cpu qemu64"),
    // AVX2 is missing.
    host("host-sandybridge", All, "-cpu SandyBridge"),
    qemu("cpu-qemu64", Normal, "-cpu qemu64"),
    qemu("cpu-kvm64", Normal, "-cpu kvm64"),
    qemu("cpu-nehalem", Normal, "-cpu Nehalem"),
    qemu("cpu-haswell", Normal, "-cpu Haswell-noTSX"),
    qemu("cpu-epyc", Normal, "-cpu EPYC"),
    Case {
        cpus: 2,
        mem_mib: 4096,
        ..qemu("4-gib", Normal, "")
    },
    Case {
        cpus: 2,
        ..qemu("ovmf", Quick, "-M q35 -bios /usr/share/ovmf/OVMF.fd")
    },
    qemu("no-smm", Normal, "-M q35,smm=off"),
    Case {
        cpus: 2,
        ..qemu("no-pv", Normal, "-cpu host,kvm=off,-x2apic")
    },
    // As a Windows guest's command line has it; Linux prefers KVM's own interface.
    qemu(
        "hyper-v",
        Normal,
        "-cpu host,hv_relaxed,hv_spinlocks=0x1fff,hv_vapic,hv_time",
    ),
    Case {
        cpus: 2,
        check: HYPERV,
        ..qemu(
            "hyper-v-alone",
            Quick,
            "-cpu host,kvm=off,hv-relaxed,hv-vapic,hv-spinlocks=0x1fff,hv-time,hv-vpindex,hv-runtime,hv-reset,hv-frequencies,hv-crash,hv-reenlightenment,hv-ipi",
        )
    },
    Case {
        cpus: 2,
        check: XEN,
        refusal: Some(NO_XEN),
        ..qemu(
            "xen",
            Normal,
            "-M q35 -accel kvm,xen-version=0x4000a,kernel-irqchip=split -cpu host,+xen-vapic -drive file={dir}/data.img,format=raw,if=xen",
        )
    },
    Case {
        cpus: 2,
        check: HYPERV_TIMERS,
        ..qemu(
            "hyper-v-synic",
            Normal,
            "-cpu host,kvm=off,hv-relaxed,hv-vapic,hv-time,hv-vpindex,hv-runtime,hv-synic,hv-stimer,hv-stimer-direct,hv-tlbflush,hv-ipi",
        )
    },
    Case {
        check: SAME_DISK,
        ..qemu(
            "virtio-blk",
            Quick,
            "-drive file={dir}/data.img,format=raw,if=virtio",
        )
    },
    Case {
        check: SAME_DISK,
        ..qemu(
            "virtio-blk-iothread",
            Normal,
            "-object iothread,id=t -device virtio-blk-pci,drive=d,iothread=t -drive file={dir}/data.img,format=raw,if=none,id=d",
        )
    },
    Case {
        check: SAME_DISK,
        ..qemu(
            "virtio-scsi",
            Normal,
            "-device virtio-scsi-pci -device scsi-hd,drive=d -drive file={dir}/data.img,format=raw,if=none,id=d",
        )
    },
    Case {
        check: SAME_DISK,
        ..qemu(
            "ide",
            Normal,
            "-drive file={dir}/data.img,format=raw,if=ide",
        )
    },
    Case {
        run: Run::Full,
        mem_mib: 512,
        check: SAME_DISK,
        ..qemu(
            "ahci",
            All,
            "-M q35 -device ide-hd,drive=d -drive file={dir}/data.img,format=raw,if=none,id=d",
        )
    },
    Case {
        run: Run::Full,
        mem_mib: 512,
        check: SAME_DISK,
        ..qemu(
            "nvme",
            All,
            "-device nvme,drive=d,serial=1 -drive file={dir}/data.img,format=raw,if=none,id=d",
        )
    },
    Case {
        run: Run::Full,
        mem_mib: 512,
        check: "mount -t 9p -o trans=virtio,version=9p2000.L f /mnt && same $(sum < /mnt/data.img) $data && echo good > /mnt/written && sync && same $(cat /mnt/written) good",
        ..qemu(
            "9p",
            All,
            "-virtfs local,path={dir},mount_tag=f,security_model=none",
        )
    },
    Case {
        check: "ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0 && same $(wget -q -O - http://10.0.2.2:{port}/ | sum) $served",
        ..qemu(
            "network",
            Quick,
            "-device virtio-net-pci,netdev=n -netdev user,id=n",
        )
    },
    Case {
        check: "test $(dd if=/dev/hwrng bs=4096 count=4 | wc -c) = 16384 && test -e /sys/bus/virtio/drivers/virtio_balloon/virtio1",
        ..qemu(
            "rng-balloon",
            Normal,
            "-device virtio-rng-pci -device virtio-balloon-pci",
        )
    },
    Case {
        run: Run::Disk,
        ..qemu(
            "boot-virtio-blk",
            Normal,
            "-device virtio-blk-pci,drive=boot",
        )
    },
    Case {
        run: Run::Disk,
        ..qemu(
            "boot-virtio-scsi",
            Normal,
            "-device virtio-scsi-pci -device scsi-hd,drive=boot",
        )
    },
    Case {
        run: Run::Disk,
        ..qemu("boot-ahci", Quick, "-M q35 -device ide-hd,drive=boot")
    },
    Case {
        run: Run::Disk,
        ..qemu("boot-ide", Normal, "-device ide-hd,drive=boot")
    },
    Case {
        run: Run::Disk,
        ..qemu("boot-nvme", Normal, "-device nvme,drive=boot,serial=1")
    },
    Case {
        run: Run::Driven(traced::doorbells),
        check: traced::CHECK,
        ..qemu(
            "doorbells",
            Quick,
            "-object iothread,id=t -device virtio-blk-pci,drive=d,iothread=t -drive file={dir}/data.img,format=raw,if=none,id=d -device virtio-net-pci,netdev=n -netdev user,id=n",
        )
    },
    Case {
        run: Run::Driven(driven::monitor),
        cpus: 2,
        ..qemu("monitor", Quick, "")
    },
    Case {
        run: Run::Driven(driven::by_loader),
        ..qemu("by-loader", Quick, "-M q35 -cpu host")
    },
    Case {
        run: Run::Driven(driven::hotplug),
        cpus: 2,
        ..qemu(
            "hotplug",
            Normal,
            "-M q35 -cpu host -smp 2,cores=4,maxcpus=4",
        )
    },
    Case {
        cpus: 2,
        check: "dmesg | grep 'DMAR-IR: Enabled IRQ remapping in x2apic mode' && test $(dd if=/dev/hwrng bs=4096 count=4 | wc -c) = 16384",
        append: "intel_iommu=on",
        ..qemu(
            "iommu",
            Normal,
            "-M q35,kernel-irqchip=split -cpu host -device intel-iommu,intremap=on,eim=on -device virtio-rng-pci",
        )
    },
    Case {
        cpus: 2,
        ..qemu("cpu-pm", Normal, "-cpu host -overcommit cpu-pm=on")
    },
    Case {
        run: Run::Driven(driven::snapshot),
        ..qemu("snapshot", Quick, "")
    },
    Case {
        run: Run::Driven(driven::migration),
        cpus: 2,
        ..qemu("migration", Normal, "")
    },
    Case {
        run: Run::Driven(driven::migration),
        cpus: 2,
        ..qemu("dirty-ring", Normal, "-accel kvm,dirty-ring-size=4096")
    },
    Case {
        mem_mib: 1024,
        ..live("live-1-gib", All, "", live::unix)
    },
    live("live-unix", Quick, "", live::unix),
    live("live-tcp", All, "-M q35 -cpu max", live::tcp),
    live(
        "live-ring",
        All,
        "-accel kvm,dirty-ring-size=4096",
        live::unix,
    ),
    live("live-file", All, "", live::file),
    live("live-multifd", All, "", live::multifd),
    live("live-converge", All, "", live::converge),
    live(
        "live-converge-ring",
        All,
        "-accel kvm,dirty-ring-size=4096",
        live::converge,
    ),
    live("live-postcopy", All, "", live::postcopy),
    live("live-preempt", All, "", live::preempt),
    live("live-xbzrle", All, "", live::xbzrle),
    live("live-cancelled", All, "", live::cancelled),
    live("live-target-dies", All, "", live::target_dies),
    live("live-namespaces", All, "", live::namespaces),
    Case {
        run: Run::Driven(driven::debugger),
        ..qemu("debugger", Normal, "")
    },
    Case {
        run: Run::Driven(driven::reboots_3),
        ..qemu("reboots-3", Normal, "")
    },
    Case {
        run: Run::Driven(driven::reboots_50),
        cpus: 2,
        ..qemu("reboots-50", All, "")
    },
];
