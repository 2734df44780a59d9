//! Draws the rows as bars, on a logarithmic scale.

/// Sizes in pixels.
const NAMES: f64 = 250.0;
const WIDTH: f64 = 520.0;
const ROW: f64 = 22.0;

/// The scale, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    /// The value at which bars begin.
    pub(super) from: f64,
    pub(super) decades: u32,
}

/// Colours of the bars, by machine.
pub(super) const NATIVE: &str = "#4e9a06";
pub(super) const OURS: &str = "#3465a4";
pub(super) const TCG: &str = "#c17d11";
pub(super) const SOURCE: &str = "#888a85";

/// A bar: name, microseconds, colour.
pub(super) type Bar = (String, f64, &'static str);

/// Returns the drawing.
pub(super) fn draw(bars: &[Bar], scale: Scale) -> String {
    let height = ROW * (bars.len() as f64 + 2.0);
    let total = NAMES + WIDTH + 80.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{total}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let place =
        |us: f64| ((us / scale.from).log10() / f64::from(scale.decades)).clamp(0.0, 1.0) * WIDTH;
    for decade in 0..=scale.decades {
        let us = scale.from * 10f64.powi(decade as i32);
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
        let bars = [
            ("one".to_owned(), 9.09, OURS),
            ("other".to_owned(), 0.5, TCG),
        ];
        let scale = Scale {
            from: 0.1,
            decades: 3,
        };
        let svg = draw(&bars, scale);
        assert_eq!(svg.matches("<rect x=").count(), bars.len());
        assert!(svg.contains("9.09") && svg.contains("100 µs"));
        assert!(svg.ends_with("</svg>\n"));
    }
}
