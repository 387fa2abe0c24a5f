//! The lines of a watch, each an event. Between two of them nothing is held: most watches are silent for most of the time.

use std::{error::Error, io, pin::Pin};

use futures::io::{AsyncBufRead, AsyncBufReadExt};

/// The next line that is not blank, without its end; none once there are no more. A line that is cut off is none: whoever reads goes on
/// from the last whole one.
pub(super) async fn next(stream: &mut Pin<&mut impl AsyncBufRead>) -> io::Result<Option<Vec<u8>>> {
    loop {
        let mut line = Vec::new();
        match stream.as_mut().read_until(b'\n', &mut line).await {
            Err(error) if is_cut_off(&error) => return Ok(None),
            Err(error) => return Err(error),
            Ok(_) if line.pop() != Some(b'\n') => return Ok(None),
            Ok(_) if line.trim_ascii().is_empty() => {}
            Ok(_) => return Ok(Some(line)),
        }
    }
}

/// Whether the other side has closed the connection before the end of its answer: that of a watch has none.
fn is_cut_off(error: &(dyn Error + 'static)) -> bool {
    let io = error.downcast_ref::<io::Error>();
    // What an I/O error wraps is not its source, but has one.
    let inner = io.and_then(io::Error::get_ref).map(|inner| inner as &(dyn Error + 'static)).or_else(|| error.source());
    io.is_some_and(|error| error.kind() == io::ErrorKind::UnexpectedEof) || inner.is_some_and(is_cut_off)
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt, TryStreamExt, stream};
    use proptest::prelude::*;

    use super::*;

    /// All lines of what comes in these pieces, and how it ended.
    async fn lines(pieces: Vec<io::Result<Vec<u8>>>) -> (Vec<String>, io::Result<()>) {
        let mut stream = std::pin::pin!(stream::iter(pieces).into_async_read());
        let mut lines = Vec::new();
        loop {
            match next(&mut stream).await {
                Ok(Some(line)) => lines.push(String::from_utf8(line).expect("a text")),
                Ok(None) => return (lines, Ok(())),
                Err(error) => return (lines, Err(error)),
            }
        }
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
            let (lines, end) = lines(pieces).now_or_never().expect("nothing to wait for");
            prop_assert!(end.is_ok());
            prop_assert_eq!(lines, expected);
        }
    }

    #[tokio::test]
    async fn a_connection_that_is_closed_is_an_end_and_what_else_goes_wrong_an_error() {
        let end = || io::Error::new(io::ErrorKind::UnexpectedEof, "unexpected EOF during chunk size line");
        for error in [end(), io::Error::other(end()), io::Error::other(io::Error::other(end()))] {
            let (lines, ended) = lines(vec![Ok(b"{}\n{".to_vec()), Err(error)]).await;
            assert!(lines == ["{}"] && ended.is_ok(), "{lines:?} {ended:?}");
        }
        let (lines, ended) = lines(vec![Ok(b"{}\n{".to_vec()), Err(io::Error::other("reset"))]).await;
        assert!(lines == ["{}"] && ended.is_err_and(|error| error.to_string() == "reset"));
    }
}
