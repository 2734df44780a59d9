//! Shows the rows as bars, with the source's beside ours.

use super::KINDS;
use crate::bench::plot::{Bar, NATIVE, OURS, SOURCE, Scale, TCG};

pub(super) const SCALE: Scale = Scale {
    from: 0.01,
    decades: 3,
};

/// Returns a bar for each row, with Haskins' after ours.
pub(super) fn bars(ns: &[f64; KINDS.len()], bare: f64, tcg: &[(&'static str, f64)]) -> Vec<Bar> {
    let mut bars = vec![("write to an eventfd".to_owned(), bare / 1e3, NATIVE)];
    for (kind, ns) in KINDS.iter().zip(ns) {
        bars.push((kind.name.to_owned(), ns / 1e3, OURS));
        if let Some((us, _)) = kind.source {
            bars.push((format!("{} (2009, hardware)", kind.name), us, SOURCE));
        }
    }
    for (name, ns) in tcg {
        bars.push(((*name).to_owned(), ns / 1e3, TCG));
    }
    bars
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_bar() {
        let bars = bars(&[200.0; KINDS.len()], 300.0, &[("TCG: port", 100.0)]);
        assert_eq!(bars.len(), 1 + KINDS.len() + 5 + 1);
    }
}
