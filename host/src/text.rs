//! Text that others chose, as it is shown: no longer than there is room for, and with what led to it.

/// At most `max` bytes of `text`, marked where it was cut.
pub fn cut(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    format!("{}…", &text[..text.floor_char_boundary(max.saturating_sub('…'.len_utf8()))])
}

/// An error with its causes, each said once.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_at_a_character_and_marked() {
        let cut_text = cut(&"é".repeat(2000), 1024);
        assert!(cut_text.len() <= 1024 && cut_text.ends_with("é…"));
        assert_eq!(cut("short", 1024), "short");
        assert_eq!(cut("ééé", 6), "ééé");
        assert_eq!(cut("ééééé", 8), "éé…");
    }
}
