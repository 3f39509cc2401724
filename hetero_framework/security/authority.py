"""The cluster's own certificate authority: X.509 certificates, made with `cryptography`.

Only this module imports `cryptography`, so a process that trains does not need it.
"""

from __future__ import annotations

import datetime
import secrets
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hetero_framework.core.addresses import parsed
from hetero_framework.core.identity import Identity
from hetero_framework.errors import IdentityError

# Machines at home may not know the time of day, so no certificate is too early or too late.
_FROM = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_TO = datetime.datetime(2049, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class Authority:
    """The authority of one cluster, whose id is the common name of the authority's certificate."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls) -> Authority:
        """A new authority, for a new cluster."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(secrets.token_hex(16))
        builder = _builder(name, name, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        builder = builder.add_extension(_key_usage(authority=True), True)
        return cls(key, builder.sign(key, hashes.SHA256()))

    @classmethod
    def from_pem(cls, pem: bytes) -> Authority:
        """The authority in a PEM. Raises IdentityError when it is not a key and its certificate."""
        try:
            key = serialization.load_pem_private_key(pem, password=None)
            certificate = x509.load_pem_x509_certificate(pem)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise IdentityError(f"the authority's file is damaged: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or (
            key.public_key() != certificate.public_key()
        ):
            raise IdentityError("the authority's key and certificate do not belong together")
        return cls(key, certificate)

    def to_pem(self) -> bytes:
        return private_pem(self.key) + self.certificate_pem

    @property
    def certificate_pem(self) -> bytes:
        return certificate_pem(self.certificate)

    @property
    def certificate_der(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.DER)

    @property
    def cluster(self) -> str:
        [name] = self.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(name.value)

    def sign(self, identity: Identity, key: ec.EllipticCurvePublicKey) -> x509.Certificate:
        """A certificate of `identity` for the owner of `key`."""
        uses = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
        return self._signed(str(identity), x509.UniformResourceIdentifier(identity.uri), key, *uses)

    def _signed(
        self,
        subject: str,
        name: x509.GeneralName,
        key: ec.EllipticCurvePublicKey,
        *uses: x509.ObjectIdentifier,
    ) -> x509.Certificate:
        builder = _builder(_name(subject), self.certificate.subject, key)
        ski = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        return (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
            .add_extension(_key_usage(authority=False), True)
            .add_extension(x509.ExtendedKeyUsage(uses), False)
            .add_extension(x509.SubjectAlternativeName([name]), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ski), False
            )
            .sign(self.key, hashes.SHA256())
        )

    def issue(self, identity: Identity) -> tuple[bytes, int]:
        """A new key with its certificate and the authority's, as one PEM, and the serial number."""
        key = new_key()
        made = self.sign(identity, key.public_key())
        return bundle(key, made, self.certificate), made.serial_number

    def issue_for_host(self, host: str) -> bytes:
        """A bundle for a server that others know by this address or name. Its certificate names no
        process, so the cluster's machines refuse it. Raises ValueError for what is no name."""
        address, key = parsed(host), new_key()
        name = x509.DNSName(host) if address is None else x509.IPAddress(address)
        made = self._signed(host, name, key.public_key(), ExtendedKeyUsageOID.SERVER_AUTH)
        return bundle(key, made, self.certificate)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def bundle(
    key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, authority: x509.Certificate
) -> bytes:
    """A machine's own PEM file, the private key first."""
    return private_pem(key) + certificate_pem(certificate) + certificate_pem(authority)


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def signing_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A request for a certificate for `key`, whose name the authority chooses. DER."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(_name("joining"))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def requested_key(request: bytes) -> ec.EllipticCurvePublicKey:
    """The key of a signing request, whose sender has the private half. Raises ValueError."""
    try:
        read = x509.load_der_x509_csr(request)
        key = read.public_key()
        valid = read.is_signature_valid
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"the signing request cannot be read: {error}") from error
    if not valid or not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("the signing request is not signed by its key")
    if not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("the signing request is for another kind of key")
    return key


def received_bundle(
    key: ec.EllipticCurvePrivateKey, certificate: str, authority: str, identity: Identity
) -> bytes:
    """The `bundle` made of the answer to a signing request. Raises ValueError unless the
    certificate is that of `identity`, made by this authority for this key."""
    leaf = x509.load_pem_x509_certificate(certificate.encode())
    signer = x509.load_pem_x509_certificate(authority.encode())
    problem = problem_of(leaf, signer, identity)
    if problem is None and leaf.public_key() != key.public_key():
        problem = "the certificate is for another key"
    if problem is not None:
        raise ValueError(problem)
    return bundle(key, leaf, signer)


def problem_of(
    certificate: x509.Certificate, authority: x509.Certificate, identity: Identity
) -> str | None:
    """The problem with a certificate that should be of `identity` and from `authority`, if any."""
    try:
        certificate.verify_directly_issued_by(authority)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return "the certificate is not of this authority"
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if uris != [identity.uri]:
        return f"the certificate names {', '.join(uris) or 'nobody'}, not {identity.uri}"
    return None


def bundle_problem(pem: bytes, identity: Identity) -> str | None:
    """The problem with a bundle that should be of `identity` and have all its parts, if any."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
        leaf, authority = x509.load_pem_x509_certificates(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        return f"it is damaged: {error}"
    if key.public_key() != leaf.public_key():
        return "key and certificate do not belong together"
    return problem_of(leaf, authority, identity)


def serial_of(pem: bytes) -> int:
    """The serial number of the certificate in a bundle. Raises ValueError."""
    return x509.load_pem_x509_certificates(pem)[0].serial_number


def pem_of(der: bytes) -> str:
    """The PEM form of a certificate. Raises ValueError."""
    return certificate_pem(x509.load_der_x509_certificate(der)).decode()


def der_of(pem: str) -> bytes:
    """The DER form of a certificate. Raises ValueError."""
    certificate = x509.load_pem_x509_certificate(pem.encode())
    return certificate.public_bytes(serialization.Encoding.DER)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(_FROM).not_valid_after(_TO)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
