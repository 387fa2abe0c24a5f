//! Text from a guest, made fit for a log line and a status: on one line, without characters that act on a terminal.

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
    fn what_acts_on_a_terminal_is_shown_instead() {
        assert_eq!(one_line("a\nb\u{1b}[31m\u{202e}\tü"), "a\\nb\\u{1b}[31m\\u{202e}\\tü");
    }
}
