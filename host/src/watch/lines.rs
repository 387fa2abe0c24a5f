//! The lines of a watch, each an event. Between two of them nothing is held: most watches are silent for most of the time.

use std::{io, pin::Pin};

use futures::io::{AsyncBufRead, AsyncBufReadExt};

/// The next line that is not blank, without its end; none once there are no more. A line that is cut off is none: whoever reads goes on
/// from the last whole one.
pub(super) async fn next(stream: &mut Pin<&mut impl AsyncBufRead>) -> io::Result<Option<Vec<u8>>> {
    loop {
        let mut line = Vec::new();
        stream.as_mut().read_until(b'\n', &mut line).await?;
        if line.pop() != Some(b'\n') {
            return Ok(None);
        }
        if !line.trim_ascii().is_empty() {
            return Ok(Some(line));
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt, TryStreamExt, stream};
    use proptest::prelude::*;

    use super::*;

    /// All lines of what comes in these pieces.
    async fn lines(pieces: Vec<io::Result<Vec<u8>>>) -> Vec<String> {
        let mut stream = std::pin::pin!(stream::iter(pieces).into_async_read());
        let mut lines = Vec::new();
        while let Ok(Some(line)) = next(&mut stream).await {
            lines.push(String::from_utf8(line).expect("a text"));
        }
        lines
    }

    proptest! {
        #[test]
        fn lines_come_whole_however_they_are_cut_into_pieces(
            text in "([a-z{}]{0,9}\r?\n){0,9}[a-z]{0,9}",
            cuts in prop::collection::vec(1..7_usize, 0..40),
        ) {
            let (mut pieces, mut rest) = (Vec::new(), text.as_bytes());
            for cut in cuts {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                pieces.push(Ok(piece.to_vec()));
                rest = after;
            }
            pieces.push(Ok(rest.to_vec()));
            let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
            let expected: Vec<&str> = whole.split('\n').filter(|line| !line.trim().is_empty()).collect();
            prop_assert_eq!(lines(pieces).now_or_never().expect("nothing to wait for"), expected);
        }
    }

    #[tokio::test]
    async fn a_line_that_breaks_off_is_the_end_after_those_that_were_whole() {
        for error in [io::Error::new(io::ErrorKind::UnexpectedEof, "no more"), io::Error::other("the stream was reset")] {
            assert_eq!(lines(vec![Ok(b"{}\n{".to_vec()), Err(error), Ok(b"}\n".to_vec())]).await, ["{}"]);
        }
    }
}
