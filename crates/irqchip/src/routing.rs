//! GSI → PIC pin, IOAPIC pin or MSI (KVM API document, KVM_SET_GSI_ROUTING).

use crate::Msi;

/// Exclusive limit of GSIs (KVM_MAX_IRQ_ROUTES), and the largest number of entries.
pub const MAX_ROUTES: usize = 4096;
/// Number of the IOAPIC's pins, and of GSIs in the default routing.
pub const NR_IOAPIC_PINS: u8 = 24;
/// Pins of the PIC pair.
pub const NR_PIC_PINS: u8 = 16;

/// Where a GSI leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// An input of the PIC pair, 0 to 15.
    Pic(u8),
    /// An input of the IOAPIC, 0 to 23.
    Ioapic(u8),
    /// A message.
    Msi(Msi),
    /// A synthetic interrupt source of Hyper-V's.
    HvSint {
        /// HV_X64_MSR_VP_INDEX.
        vp: u32,
        /// Number of the source. Interrupts of a source above 15 have no effect.
        sint: u32,
    },
    /// An event channel of Xen's.
    XenEvent {
        /// Id of the vCPU.
        vcpu: u32,
        /// Number of the channel.
        port: u32,
    },
}

/// One entry of KVM_SET_GSI_ROUTING.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Global system interrupt.
    pub gsi: u32,
    /// Where it leads.
    pub route: Route,
}

/// Why a table was refused; KVM's errno for all of them is EINVAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// Too many entries.
    #[error("{0} routing entries are more than {MAX_ROUTES}")]
    TooMany(usize),
    /// The GSI is out of range.
    #[error("gsi {0} is not below {MAX_ROUTES}")]
    Gsi(u32),
    /// The pin does not exist, or its chip is in the VMM (split irqchip).
    #[error("gsi {gsi}: no such pin {pin}")]
    Pin {
        /// The entry's GSI.
        gsi: u32,
        /// The pin asked for.
        pin: u8,
    },
    /// Two entries of one GSI exclude each other.
    #[error("gsi {0} has two routes that exclude each other")]
    Conflict(u32),
    /// Reserved bits in an MSI address.
    #[error("gsi {0}: reserved bits in the msi address")]
    Msi(u32),
}

/// Which entries a table may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteRules {
    /// PIC and IOAPIC are in the VMM (KVM_CAP_SPLIT_IRQCHIP): only MSIs are routed.
    pub split: bool,
    /// KVM_X2APIC_API_USE_32BIT_IDS.
    pub x2apic_format: bool,
}

/// A routing table. It is immutable: KVM_SET_GSI_ROUTING replaces it whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routing {
    /// Sorted by GSI.
    routes: Vec<Entry>,
}

impl Routing {
    /// KVM's table after KVM_CREATE_IRQCHIP: GSI n is pin n of the IOAPIC, and
    /// of the PIC for n < 16. (VMMs that describe the PIT on pin 2 replace it.)
    pub fn default_kvm() -> Self {
        let routes = (0..NR_IOAPIC_PINS)
            .flat_map(|pin| {
                let entry = move |route| Entry {
                    gsi: u32::from(pin),
                    route,
                };
                let pic = (pin < NR_PIC_PINS).then(|| entry(Route::Pic(pin)));
                pic.into_iter().chain([entry(Route::Ioapic(pin))])
            })
            .collect();
        Self { routes }
    }

    /// Checks the entries and builds a table.
    pub fn new(entries: &[Entry], rules: RouteRules) -> Result<Self, RouteError> {
        if entries.len() > MAX_ROUTES {
            return Err(RouteError::TooMany(entries.len()));
        }
        for e in entries {
            check(e, rules)?;
        }
        let mut routes = entries.to_vec();
        // The sort is stable, so routes of one GSI keep the order in which they were given.
        routes.sort_by_key(|e| e.gsi);
        for same in routes.chunk_by(|a, b| a.gsi == b.gsi) {
            for (i, a) in same.iter().enumerate() {
                if same.iter().skip(i + 1).any(|b| conflict(a, b)) {
                    return Err(RouteError::Conflict(a.gsi));
                }
            }
        }
        Ok(Self { routes })
    }

    /// The routes of one GSI.
    pub fn routes(&self, gsi: u32) -> &[Entry] {
        let from = self.routes.partition_point(|e| e.gsi < gsi);
        let len = self.routes[from..].partition_point(|e| e.gsi == gsi);
        &self.routes[from..from + len]
    }

    /// All entries, sorted by GSI.
    pub fn entries(&self) -> &[Entry] {
        &self.routes
    }

    /// Returns the GSI that leads to a chip's pin. An EOI of that pin signals this GSI's resample eventfds.
    pub fn gsi_of(&self, route: Route) -> Option<u32> {
        self.routes.iter().find(|e| e.route == route).map(|e| e.gsi)
    }
}

fn check(e: &Entry, rules: RouteRules) -> Result<(), RouteError> {
    let gsi = e.gsi;
    if gsi as usize >= MAX_ROUTES {
        return Err(RouteError::Gsi(gsi));
    }
    match e.route {
        Route::Pic(pin) if rules.split || pin >= NR_PIC_PINS => Err(RouteError::Pin { gsi, pin }),
        Route::Ioapic(pin) if rules.split || pin >= NR_IOAPIC_PINS => {
            Err(RouteError::Pin { gsi, pin })
        }
        Route::Msi(msi) if !msi.is_valid(rules.x2apic_format) => Err(RouteError::Msi(gsi)),
        _ => Ok(()),
    }
}

/// True if two entries of one GSI exclude each other. A GSI may lead to several chips, but only once to each, and an
/// MSI must be its only route. Master and slave PIC are two chips.
fn conflict(a: &Entry, b: &Entry) -> bool {
    match (a.route, b.route) {
        (Route::Pic(a), Route::Pic(b)) => a / 8 == b / 8,
        (Route::Pic(_), Route::Ioapic(_)) | (Route::Ioapic(_), Route::Pic(_)) => false,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: RouteRules = RouteRules {
        split: false,
        x2apic_format: true,
    };

    fn entry(gsi: u32, route: Route) -> Entry {
        Entry { gsi, route }
    }

    #[test]
    fn default_table() {
        let r = Routing::default_kvm();
        assert_eq!(r.entries().len(), 40);
        assert_eq!(
            r.routes(4),
            [entry(4, Route::Pic(4)), entry(4, Route::Ioapic(4))]
        );
        assert_eq!(r.routes(20), [entry(20, Route::Ioapic(20))]);
        assert!(r.routes(24).is_empty());
        assert_eq!(r.gsi_of(Route::Ioapic(23)), Some(23));
        assert_eq!(Routing::new(r.entries(), RULES).as_ref(), Ok(&r));
    }

    #[test]
    fn refusals() {
        let msi = Route::Msi(Msi::default());
        let bad = Route::Msi(Msi {
            address_hi: 1,
            ..Msi::default()
        });
        let cases: &[(&[Entry], RouteError)] = &[
            (&[entry(4096, msi)], RouteError::Gsi(4096)),
            (&[entry(1, bad)], RouteError::Msi(1)),
            (
                &[entry(1, Route::Ioapic(24))],
                RouteError::Pin { gsi: 1, pin: 24 },
            ),
            (
                &[entry(1, Route::Pic(16))],
                RouteError::Pin { gsi: 1, pin: 16 },
            ),
            (
                &[entry(9, msi), entry(3, msi), entry(9, Route::Pic(1))],
                RouteError::Conflict(9),
            ),
            (
                &[entry(9, Route::Pic(0)), entry(9, Route::Pic(7))],
                RouteError::Conflict(9),
            ),
        ];
        for (entries, error) in cases {
            assert_eq!(Routing::new(entries, RULES), Err(*error), "{entries:?}");
        }
        assert!(Routing::new(&[entry(9, Route::Pic(0)), entry(9, Route::Pic(8))], RULES).is_ok());
        let split = RouteRules {
            split: true,
            ..RULES
        };
        assert!(Routing::new(&[entry(1, Route::Ioapic(1))], split).is_err());
        assert!(Routing::new(&[entry(1, msi)], split).is_ok());
        assert_eq!(
            Routing::new(&vec![entry(0, msi); 4097], RULES),
            Err(RouteError::TooMany(4097))
        );
    }
}
