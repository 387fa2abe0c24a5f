//! What a guest may be denied, as a closed set: the labels of a metric, and the words of a log line.

/// Why a host call of a guest was denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Denial {
    /// HTTP to a host that is not both claimed and allowed.
    HttpHost,
    /// HTTP to an address that guests must not reach.
    HttpAddress,
    /// HTTP whose credentials or CA the host may not use or cannot find.
    HttpSecret,
    /// HTTP that is no plain request: a tunnel, or a URL that is none.
    HttpRequest,
    /// HTTP to a server whose certificate is not trusted.
    HttpCertificate,
    /// A read of the cluster beyond claim and permissions.
    ClusterRead,
    /// A socket of its own.
    Socket,
    /// A look-up of a name.
    NameLookup,
    /// Files.
    Files,
}

impl Denial {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::HttpHost,
        Self::HttpAddress,
        Self::HttpSecret,
        Self::HttpRequest,
        Self::HttpCertificate,
        Self::ClusterRead,
        Self::Socket,
        Self::NameLookup,
        Self::Files,
    ];

    /// The capability that was asked for.
    pub fn capability(self) -> &'static str {
        match self {
            Self::HttpHost | Self::HttpAddress | Self::HttpSecret | Self::HttpRequest | Self::HttpCertificate => "http",
            Self::ClusterRead => "cluster",
            Self::Socket | Self::NameLookup => "sockets",
            Self::Files => "filesystem",
        }
    }

    /// What stood against it.
    pub fn reason(self) -> &'static str {
        match self {
            Self::HttpHost => "host",
            Self::HttpAddress => "address",
            Self::HttpSecret => "secret",
            Self::HttpRequest => "request",
            Self::HttpCertificate => "certificate",
            Self::ClusterRead => "read",
            Self::Socket => "socket",
            Self::NameLookup => "lookup",
            Self::Files => "files",
        }
    }
}
