//! A case that `anykvm trace` observes: queues are rung without the VMM, and interrupts come without a call of a vCPU's
//! thread.

use std::fs;

use testkit::boot::run_limited;

use super::{LIMIT, Setup, guest};

const TRACE: &str = "trace.jsonl";
/// KVM_IOEVENTFD_FLAG_DEASSIGN and KVM_IRQFD_FLAG_DEASSIGN.
const IOEVENTFD_DEASSIGN: u64 = 4;
const IRQFD_DEASSIGN: u64 = 1;

/// The guest's work: reads a disk in many pieces, exchanges packets, and prints how many interrupts that took.
pub(super) const CHECK: &str = "same $(cat /dev/vda | sum) $data && dd if=/dev/vda of=/dev/null bs=4096 count=500 iflag=direct && \
     ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0 && ping -c 30 -i 0.05 10.0.2.2 && \
     echo INTERRUPTS req $(sed -n 's/^.*: *\\([0-9]*\\) .*-req.0$/\\1/p' /proc/interrupts) && \
     echo INTERRUPTS input $(sed -n 's/^.*: *\\([0-9]*\\) .*-input.0$/\\1/p' /proc/interrupts)";

/// Returns the word behind `"key":` in a line, without its quotes.
fn value<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(&format!("\"{key}\":"))?;
    let end = rest.find([',', '}'])?;
    Some(rest.get(..end)?.trim_matches('"'))
}

fn number(line: &str, key: &str) -> Option<u64> {
    let text = value(line, key)?;
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

pub(super) fn doorbells(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    let file = setup.dir.join(TRACE);
    let mut command =
        setup.command_through(&["trace", "-o", &file.display().to_string()], arguments);
    setup.kernel(&mut command, "");
    command.args(["-no-reboot", "-serial", "stdio"]);
    let outcome = run_limited(&mut command, LIMIT).map_err(|e| e.to_string())?;
    guest::verdict(&outcome)?;
    let trace = fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    let text = outcome.text();
    let interrupts = |queue: &str| {
        let line = text
            .lines()
            .find(|l| l.contains(&format!("INTERRUPTS {queue}")));
        let count = line.and_then(|l| l.rsplit(' ').next()?.trim().parse::<usize>().ok());
        count.ok_or(format!(
            "the guest did not say how many {queue} interrupts it had"
        ))
    };
    judge(&trace, interrupts("req")?, interrupts("input")?)
}

fn judge(trace: &str, disk: usize, net: usize) -> Result<(), String> {
    let calls = |name: &str| {
        let name = format!("\"ioctl\":\"{name}\"");
        trace
            .lines()
            .enumerate()
            .filter(move |(_, l)| l.contains(&name))
    };
    // Addresses of doorbells, and the line of the last registration of each.
    let mut bells = Vec::<(u64, usize)>::new();
    for (at, line) in calls("KVM_IOEVENTFD") {
        let address = number(line, "addr").unwrap_or(0);
        let flags = number(line, "flags").unwrap_or(0);
        // Only PCI devices' registers count, because QEMU tries others when it starts.
        if flags & IOEVENTFD_DEASSIGN == 0 && address >= 0x1000 {
            bells.retain(|b| b.0 != address);
            bells.push((address, at));
        }
    }
    let memory = bells.iter().filter(|b| b.0 >> 16 != 0).count();
    if memory < 2 {
        return Err(format!(
            "{memory} doorbells in memory, of a disk and a network adapter"
        ));
    }
    let exits = calls("KVM_RUN").filter(|(at, line)| {
        let address = number(line, "gpa").or_else(|| number(line, "port"));
        line.contains("\"is_write\":true")
            && bells.iter().any(|b| Some(b.0) == address && *at > b.1)
    });
    let exits = exits.count();
    if exits != 0 {
        return Err(format!("{exits} writes to doorbells came to the VMM"));
    }
    let irqfds = calls("KVM_IRQFD").filter(|(_, l)| {
        number(l, "flags").is_some_and(|f| f & IRQFD_DEASSIGN == 0) && l.contains("\"result\":0,")
    });
    if irqfds.count() == 0 {
        return Err("no irqfd".into());
    }
    // Without vhost, QEMU's network adapter sends messages; the disk's interrupts all come by irqfds.
    let messages = calls("KVM_SIGNAL_MSI").count();
    if disk < 100 || net < 20 || messages > 3 * net + 20 {
        return Err(format!(
            "{disk} interrupts of the disk, {net} of the network adapter, by {messages} messages"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"ioctl":"KVM_IOEVENTFD","in":{"datamatch":"0x0","addr":"0xfebfb000","len":0,"fd":17,"flags":0},"result":0,"ns":1}
{"ioctl":"KVM_IOEVENTFD","in":{"datamatch":"0x0","addr":"0xfebfc000","len":0,"fd":18,"flags":0},"result":0,"ns":1}
{"ioctl":"KVM_IRQFD","in":{"fd":3,"gsi":2,"flags":0,"resamplefd":0},"result":0,"ns":1}
{"ioctl":"KVM_RUN","result":0,"exit":{"reason":"MMIO","gpa":"0xfed00100","len":4,"is_write":true,"data":"30000000"},"ns":1}
"#;

    #[test]
    fn a_doorbell_that_rings_in_the_vmm_is_found() {
        assert_eq!(judge(GOOD, 500, 30), Ok(()));
        let rung = GOOD.replace("0xfed00100", "0xfebfc000");
        assert!(judge(&rung, 500, 30).is_err());
        let none = GOOD.replace("KVM_IRQFD", "KVM_SIGNAL_MSI");
        assert!(judge(&none, 500, 30).is_err());
        let messages = "{\"ioctl\":\"KVM_SIGNAL_MSI\"}\n".repeat(500);
        assert!(judge(&(GOOD.to_owned() + &messages), 500, 30).is_err());
        assert!(judge(&GOOD.replace("0xfebfc000", "0xfebfb000"), 500, 30).is_err());
    }
}
