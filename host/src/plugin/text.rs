//! Text from a guest, made fit for a log line and a status: bounded, on one line, without characters that act on a terminal.

/// At most `limit` bytes, with an ellipsis where some were cut, between characters.
pub fn shorten(text: &str, limit: usize) -> String {
    const CUT: &str = "…";
    if text.len() <= limit {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(limit.saturating_sub(CUT.len()));
    format!("{}{CUT}", &text[..end])
}

/// With control characters, line separators and marks that change the direction of writing shown as escapes.
pub fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if acts(c) { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

fn acts(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_between_characters_within_its_limit() {
        assert_eq!(shorten("ééé", 6), "ééé");
        assert_eq!(shorten("ééééé", 8), "éé…");
    }

    #[test]
    fn what_acts_on_a_terminal_is_shown_instead() {
        assert_eq!(one_line("a\nb\u{1b}[31m\u{202e}\tü"), "a\\nb\\u{1b}[31m\\u{202e}\\tü");
    }
}
