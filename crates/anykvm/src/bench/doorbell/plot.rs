//! The rows as bars, on a logarithmic scale.

use super::KINDS;

/// Pixels.
const NAMES: f64 = 250.0;
const WIDTH: f64 = 520.0;
const ROW: f64 = 22.0;
/// The scale, in microseconds: four decades.
const FROM: f64 = 0.01;
const DECADES: f64 = 3.0;

/// Who a bar belongs to, by its colour.
const OURS: &str = "#3465a4";
const TCG: &str = "#c17d11";
const SOURCE: &str = "#888a85";

/// Name, microseconds, colour.
pub(super) type Bar = (String, f64, &'static str);

/// A bar for each row, Haskins' after ours.
pub(super) fn bars(ns: &[f64; KINDS.len()], bare: f64, tcg: &[(&'static str, f64)]) -> Vec<Bar> {
    let mut bars = vec![("write to an eventfd".to_owned(), bare / 1e3, "#4e9a06")];
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

/// The drawing.
pub(super) fn draw(bars: &[Bar]) -> String {
    let height = ROW * (bars.len() as f64 + 2.0);
    let total = NAMES + WIDTH + 80.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{total}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let place = |us: f64| ((us / FROM).log10() / DECADES).clamp(0.0, 1.0) * WIDTH;
    for us in [0.01, 0.1, 1.0, 10.0] {
        let x = NAMES + place(us);
        svg.push_str(&format!(
            "<line x1=\"{x}\" x2=\"{x}\" y1=\"{ROW}\" y2=\"{}\" stroke=\"#d3d7cf\"/>\n\
             <text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{us} µs</text>\n",
            height - ROW,
            ROW * 0.7
        ));
    }
    for ((name, us, colour), row) in bars.iter().zip(1u32..) {
        let y = ROW * f64::from(row);
        let (width, text) = (place(*us), y + ROW * 0.7);
        svg.push_str(&format!(
            "<text x=\"{}\" y=\"{text}\" text-anchor=\"end\">{name}</text>\n\
             <rect x=\"{NAMES}\" y=\"{}\" width=\"{width:.1}\" height=\"{}\" fill=\"{colour}\"/>\n\
             <text x=\"{:.1}\" y=\"{text}\">{us:.2}</text>\n",
            NAMES - 8.0,
            y + 3.0,
            ROW - 6.0,
            NAMES + width + 6.0
        ));
    }
    svg.push_str("</svg>\n");
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_bar() {
        let bars = bars(&[200.0; KINDS.len()], 300.0, &[("TCG: port", 100.0)]);
        assert_eq!(bars.len(), 1 + KINDS.len() + 5 + 1);
        let svg = draw(&bars);
        assert_eq!(svg.matches("<rect x=").count(), bars.len());
        assert!(svg.contains("9.09") && svg.ends_with("</svg>\n"));
    }
}
